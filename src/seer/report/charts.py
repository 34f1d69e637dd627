# SPDX-License-Identifier: Apache-2.0
"""The report's charts, each from a `RunData`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from seer.analysis.explain import HEADINGS
from seer.analysis.tool_waits import ToolWait
from seer.report.run_data import RunData
from seer.report.svg import BOTTOM, TOP, Frame, bar, chart, colour, steps

WIDTH = 1080
TRACK_HEIGHT = 9
TOOL_TRACK_HEIGHT = 3
"""At least: hundreds may wait for their tools at once."""
SPLIT_COLOURS = {
    "decode": "#3b6fb6",
    "prefill": "#4aa3a2",
    "recompute": "#b39b35",
    "migration": "#6b8e4e",
    "speculation": "#a8577e",
    "overhead": "#8a6d5b",
    "imbalance": "#d9a26b",
    "tail": "#c8503c",
    "tools": "#5f7fa0",
    "queueing": "#9aa0a6",
}


def timeline(run: RunData) -> str:
    """Every chunk on its instance, a track per running request; the tail is shaded, its requests outlined."""
    late = {request for request, (end_s, _, _) in run.ended.items() if end_s > run.tail_from_s}
    parts = []
    for instance in range(run.num_instances):
        bars = [one for one in run.chunks if one.instance == instance]
        num_tracks = 1 + max((one.track for one in bars), default=0)
        frame = Frame(WIDTH, num_tracks * TRACK_HEIGHT + TOP + BOTTOM, _until_s(run), num_tracks)
        body = [_tail_shade(frame, run), frame.axes("s", f"inst. {instance}")]
        for one in bars:
            y = TOP + one.track * TRACK_HEIGHT
            group = run.group_of.get(one.request, 0)
            title = (
                f"prompt {group}, response {run.index_of.get(one.request)}: "
                f"{one.from_s:.2f} to {one.to_s:.2f} s, {one.num_generated} tokens so far, {one.end}"
            )
            if one.migrated_from is not None:
                title += f", moved from instance {one.migrated_from}"
            outline = 'stroke="#c8503c" stroke-width="1"' if one.request in late else ""
            begins = one.decoding_s if one.decoding_s is not None else one.from_s
            if begins > one.from_s:
                body.append(
                    bar(
                        (
                            frame.x(one.from_s),
                            y + 3,
                            frame.x(begins) - frame.x(one.from_s),
                            TRACK_HEIGHT - 7,
                        ),
                        "#9aa0a6",
                        f"waiting or prefill; {title}",
                    )
                )
            width = frame.x(one.to_s) - frame.x(begins)
            body.append(bar((frame.x(begins), y + 0.5, width, TRACK_HEIGHT - 1.5), colour(group), title, outline))
        parts.append(chart(frame, "".join(body), f"timeline of instance {instance}"))
    return "".join(parts)


def tools(run: RunData) -> str:
    """Requests that wait for their tools, a track for each: they hold no instance."""
    tracks = _tracks(run.tool_waits)
    num_tracks = 1 + max(tracks)
    height = max(TOOL_TRACK_HEIGHT, TRACK_HEIGHT - num_tracks // 40)
    frame = Frame(WIDTH, num_tracks * height + TOP + BOTTOM, _until_s(run), num_tracks)
    body = [_tail_shade(frame, run), frame.axes("s", "tools")]
    for one, track in zip(run.tool_waits, tracks, strict=True):
        group = run.group_of.get(one.request, 0)
        title = (
            f"prompt {group}, response {run.index_of.get(one.request)} waits for its tool after turn {one.turn}: "
            f"{one.from_s:.2f} to {one.to_s:.2f} s, {one.num_tokens} tokens given, {one.end}"
        )
        fill, look = ("#c8503c", "") if one.has_failed else (colour(group), 'opacity="0.45"')
        width = frame.x(one.to_s) - frame.x(one.from_s)
        body.append(bar((frame.x(one.from_s), TOP + track * height, width, height - 1.0), fill, title, look))
    return chart(frame, "".join(body), "requests that wait for their tools")


def _tracks(waits: Sequence[ToolWait]) -> list[int]:
    """For each wait the lowest track that is free when it begins."""
    free_s: list[float] = []
    found = [0] * len(waits)
    for number in sorted(range(len(waits)), key=lambda number: waits[number].from_s):
        one = waits[number]
        track = next((track for track, until_s in enumerate(free_s) if until_s <= one.from_s), len(free_s))
        free_s[track : track + 1] = [one.to_s]
        found[number] = track
    return found


def _until_s(*runs: RunData) -> float:
    """Where the time axis of these runs ends: a little after the longest, so that its end is seen."""
    return max(run.makespan_s for run in runs) * 1.01


def _tail_shade(frame: Frame, run: RunData) -> str:
    if run.makespan_s <= run.tail_from_s:
        return ""
    x = frame.x(run.tail_from_s)
    size = f'width="{frame.x(run.makespan_s) - x:.1f}" height="{frame.height - TOP - BOTTOM}"'
    title = f"tail: the last tenth of the responses, {run.makespan_s - run.tail_from_s:.1f} s"
    return f'<rect class="tail" x="{x:.1f}" y="{TOP}" {size}><title>{title}</title></rect>'


def running(run: RunData) -> str:
    """Running requests of each instance over time."""
    frame = Frame(WIDTH, 150, _until_s(run), max([1, *(s.num_running for states in run.states for s in states)]))
    body = [_tail_shade(frame, run), frame.axes("s", "running")]
    for instance, states in enumerate(run.states):
        points = [(0.0, 0.0), *((max(0.0, s.t_s), float(s.num_running)) for s in states)]
        body.append(steps(frame, points, run.makespan_s, colour(instance), f"instance {instance}"))
    return chart(frame, "".join(body), "running requests")


def kv_use(run: RunData) -> str:
    """KV memory in use, as a share of what each instance has."""
    shares = [100.0 / run.kv_tokens(instance) for instance in range(run.num_instances)]
    peak = max((s.kv_tokens * shares[s.instance] for states in run.states for s in states), default=0.0)
    frame = Frame(WIDTH, 150, _until_s(run), min(100.0, max(5.0, 1.1 * peak)))
    body = [_tail_shade(frame, run), frame.axes("s", "KV %")]
    for instance, states in enumerate(run.states):
        points = [(0.0, 0.0), *((max(0.0, s.t_s), min(frame.y_max, s.kv_tokens * shares[instance])) for s in states)]
        body.append(steps(frame, points, run.makespan_s, colour(instance), f"instance {instance}"))
    return chart(frame, "".join(body), "KV memory in use")


def drafts(run: RunData) -> str:
    """Draft tokens per second: verified, and accepted."""
    bin_s = max(run.makespan_s / 120, 1e-6)
    series = []
    for instance, reports in enumerate(run.steps):
        drafted, accepted = [0.0] * 121, [0.0] * 121
        for report in reports:
            place = min(120, max(0, int(report.t_s / bin_s)))
            drafted[place] += report.num_drafted / bin_s
            accepted[place] += report.num_accepted / bin_s
        lines = [[(i * bin_s, y) for i, y in enumerate(values)] for values in (drafted, accepted)]
        series.append((instance, lines[0], lines[1]))
    peak = max((y for _, line, _ in series for _, y in line), default=0.0)
    if not peak:
        return '<p class="soft">None were verified: speculation was off, or did not pay.</p>'
    frame = Frame(WIDTH, 150, _until_s(run), max(1.0, peak))
    body = [_tail_shade(frame, run), frame.axes("s", "drafts/s")]
    for instance, verified_line, accepted_line in series:
        body.append(steps(frame, verified_line, run.makespan_s, "#b9bec4", f"instance {instance}: verified"))
        body.append(steps(frame, accepted_line, run.makespan_s, colour(instance), f"instance {instance}: accepted"))
    return chart(frame, "".join(body), "draft tokens verified and accepted")


def finishes(runs: Sequence[RunData]) -> str:
    """Share of the responses that have ended, over time, a line per run."""
    frame = Frame(WIDTH, 230, _until_s(*runs), 100.0)
    body = [frame.axes("s", "% ended")]
    for index, run in enumerate(runs):
        ends = sorted(run.ends_s)
        points = [(0.0, 0.0), *((end, 100.0 * (i + 1) / len(ends)) for i, end in enumerate(ends))]
        body.append(steps(frame, points, run.makespan_s, colour(index), run.title))
        x = frame.x(run.makespan_s)
        body.append(f'<circle cx="{x:.1f}" cy="{frame.y(100.0):.1f}" r="3.5" fill="{colour(index)}"/>')
    return chart(frame, "".join(body), "responses ended over time")


def splits(runs: Sequence[RunData]) -> str:
    """Where the time went, a bar per run, with the oracle estimate as a mark."""
    height = 34
    explained = [run for run in runs if run.explanation is not None]
    frame = Frame(WIDTH, height * len(explained) + TOP + BOTTOM, _until_s(*runs), 1.0)
    body = [frame.axes("s", "")]
    for row, run in enumerate(explained):
        explanation = run.explanation
        assert explanation is not None, "explained runs only"
        y = TOP + row * height + 5
        at = 0.0
        body.append(f'<text class="label" x="1" y="{y + 14:.1f}">{escape(run.title[:9])}</text>')
        for heading in HEADINGS:
            value = explanation.seconds[heading]
            if value > 0:
                width = frame.x(at + value) - frame.x(at)
                title = f"{run.title}: {heading} {value:.2f} s ({100 * value / explanation.makespan_s:.0f}%)"
                body.append(bar((frame.x(at), y, width, height - 14), SPLIT_COLOURS[heading], title))
            at += value
        if explanation.oracle_s is not None:
            x = frame.x(explanation.oracle_s)
            body.append(
                f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y + height - 10}">'
                f"<title>oracle estimate {explanation.oracle_s:.1f} s</title></line>"
            )
    return chart(frame, "".join(body), "where the time went")


def split_legend() -> str:
    """The colours of `splits`."""
    items = (f'<span><i style="background:{SPLIT_COLOURS[h]}"></i>{h}</span>' for h in HEADINGS)
    return f'<p class="legend">{"".join(items)}<span><i class="bound"></i>oracle estimate</span></p>'


def line_legend(names: Sequence[str]) -> str:
    """The colours of lines."""
    items = (f'<span><i style="background:{colour(i)}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<p class="legend">{"".join(items)}</p>'
