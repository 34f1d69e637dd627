# SPDX-License-Identifier: Apache-2.0
"""Pictures of simulated runs, as SVG files: load over time (the paper's Figure 3), instances, finish times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from seer.machine.whole_files import write_whole
from seer.metrics.summary import TAIL_SHARE, tail_start_s
from seer.report.svg import BOTTOM, LEFT, RIGHT, TOP, Frame, colour, document, mark, moved, steps, words
from seer.report.timeline import Floats, Timeline

WIDTH = 960
HEAD = 52
"""Height of the title and the legend."""
LEGEND_LINE = 18
"""Height of a further line of the legend."""
FOOT = 20
"""Height of the name of the time axis."""
POINTS = 600
"""Samples along the time axis: about one per pixel and a half."""
LEVELS = 12
"""Shades of an instance's load; neighbours still look different."""
FAINT, ACCENT, ALARM = "#b8c4d6", colour(0), "#c0392b"
PALE, DARK = (221, 232, 245), (22, 50, 92)


def plot_load(timeline: Timeline, kv_capacity_tokens: int, title: str, path: Path) -> None:
    """KV use and running requests over time: each instance faint, their mean bold, preemptions marked."""
    times_s = timeline.grid(POINTS)
    running = timeline.running(times_s)
    panels = (
        ("KV memory in use (%)", 100.0 * timeline.kv_tokens(times_s) / kv_capacity_tokens, 105.0),
        ("running requests", running, max(1.0, 1.05 * float(running.max(initial=0.0)))),
    )
    height, body = 220, []
    for place, (name, rows, peak) in enumerate(panels):
        frame = Frame(WIDTH, height, timeline.makespan_s, peak)
        lines = [frame.axes("", name)]
        lines += [_line(frame, times_s, row, FAINT, f"instance {i}", width=0.7) for i, row in enumerate(rows)]
        lines.append(_line(frame, times_s, rows.mean(axis=0), ACCENT, "mean", width=2.2))
        lines.append(_tail_mark(frame, timeline))
        if place == 0:
            lines.append(_preemption_marks(frame, timeline))
        body.append(moved(HEAD + place * height, "".join(lines)))
    legend = [("mean of the instances", ACCENT), ("each instance", FAINT)]
    num_preemptions = timeline.preemptions_s().size
    if num_preemptions:
        legend.append((f"preemptions: {num_preemptions:,}", ALARM))
    total = HEAD + 2 * height + FOOT
    _save(path, total, title, [*_legend(legend), *body, _time_axis(total)])


def plot_instances(timeline: Timeline, title: str, path: Path) -> None:
    """A row per instance, as dark as it is full of requests; white is idle."""
    num = timeline.num_instances
    row_height = min(18.0, max(3.0, 480 / num))
    frame = Frame(WIDTH, round(num * row_height) + TOP + BOTTOM, timeline.makespan_s, num)
    running = timeline.running(timeline.grid(POINTS))
    peak = max(1.0, float(running.max(initial=0.0)))
    levels = np.ceil(running * LEVELS / peak).astype(int)
    edges_s = np.linspace(0.0, timeline.makespan_s, POINTS + 1)
    cells: list[list[str]] = [[] for _ in range(LEVELS + 1)]
    for instance in range(num):
        y = TOP + instance * row_height
        for first, last, level in _stretches(levels[instance]):
            x, until = frame.x(edges_s[first]), frame.x(edges_s[last])
            cells[level].append(f"M{x:.1f},{y:.1f}H{until:.1f}V{y + row_height - 0.5:.1f}H{x:.1f}Z")
    body = [frame.axes("", ""), words(4, 11, "instance")]
    body += [
        f'<path fill="{_shade(level)}" shape-rendering="crispEdges" d="{"".join(shapes)}"/>'
        for level, shapes in enumerate(cells)
        if level and shapes
    ]
    every = max(1, round(12 / row_height))
    for instance in range(0, num, every):
        y = TOP + (instance + 0.5) * row_height + 4
        body.append(f'<text class="tick" x="{LEFT - 6}" y="{y:.1f}" text-anchor="end">{instance}</text>')
    body.append(_tail_mark(frame, timeline))
    total = HEAD + frame.height + FOOT
    _save(path, total, title, [_shade_legend(peak), moved(HEAD, "".join(body)), _time_axis(total)])


def plot_finish_times(timelines: Mapping[str, Timeline], title: str, path: Path) -> None:
    """Share of requests finished over time, a line per scheduler; the dotted line is where the tail begins."""
    longest_s = max((timeline.makespan_s for timeline in timelines.values()), default=0.0)
    frame = Frame(WIDTH, 360, longest_s, 102.0)
    body = [frame.axes("", "requests finished (%)", num_y_ticks=10)]
    for number, (scheduler, timeline) in enumerate(timelines.items()):
        ends_s = timeline.ends_s()
        if not ends_s.size:
            continue
        times_s = np.append(timeline.grid(POINTS), timeline.makespan_s)
        share = 100.0 * np.searchsorted(ends_s, times_s, side="right") / ends_s.size
        body.append(_line(frame, times_s, share, colour(number), scheduler, width=2.0))
        x, y = frame.x(timeline.makespan_s), frame.y(100.0)
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour(number)}"/>')
    y = frame.y(100.0 * (1 - TAIL_SHARE))
    body.append(mark(LEFT, y, WIDTH - RIGHT, y))
    body.append(words(LEFT + 6, y - 5, "above this line: the tail, the last 10% to finish"))
    names = [
        (f"{scheduler} ({timeline.makespan_s:,.0f} s)", colour(number))
        for number, (scheduler, timeline) in enumerate(timelines.items())
    ]
    legend = _legend(names)
    head = HEAD + LEGEND_LINE * (len(legend) - 1)
    total = head + frame.height + FOOT
    _save(path, total, title, [*legend, moved(head, "".join(body)), _time_axis(total)])


def _line(frame: Frame, times_s: Floats, values: Floats, stroke: str, name: str, *, width: float) -> str:
    changes = np.flatnonzero(np.diff(values, prepend=np.nan) != 0)  # the first always is one
    points = [(float(times_s[i]), min(frame.y_max, float(values[i]))) for i in changes]
    return steps(frame, points, float(times_s[-1]), stroke, name, width=width)


def _stretches(levels: np.ndarray[tuple[int], np.dtype[np.int_]]) -> Iterator[tuple[int, int, int]]:
    """First, end and value of every stretch of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist(), len(levels)]
    for first, end in pairwise(edges):
        yield first, end, int(levels[first])


def _tail_mark(frame: Frame, timeline: Timeline) -> str:
    ends_s = timeline.ends_s()
    if not ends_s.size:
        return ""
    x = frame.x(tail_start_s(ends_s.tolist()))
    # At the right edge there is no room beside the line.
    name = words(x + 4, TOP - 5, "tail") if x < WIDTH - 50 else words(x - 4, TOP - 5, "tail", "end")
    return mark(x, TOP - 14, x, frame.height - BOTTOM) + name


def _preemption_marks(frame: Frame, timeline: Timeline) -> str:
    """A red tick above the panel for every pixel in which a request was preempted."""
    columns = np.unique(np.round([frame.x(float(at_s)) for at_s in timeline.preemptions_s()]))
    ticks = "".join(f"M{x:.0f},{TOP - 6}v8" for x in columns)
    return f'<path d="{ticks}" stroke="{ALARM}"/>' if ticks else ""


def _legend(names: Sequence[tuple[str, str]]) -> list[str]:
    """Names in their colours, a string per line."""
    lines, x = [""], 12.0
    for name, fill in names:
        needed = 34 + 6.6 * len(name)  # the mean width of a letter at this size; a little more does no harm
        if x > 12 and x + needed > WIDTH:
            lines.append("")
            x = 12.0
        y = 34 + LEGEND_LINE * (len(lines) - 1)
        lines[-1] += f'<rect x="{x:.0f}" y="{y}" width="14" height="5" fill="{fill}"/>' + words(x + 19, y + 7, name)
        x += needed
    return lines


def _shade(level: int) -> str:
    share = (level - 1) / (LEVELS - 1)
    red, green, blue = (round(pale + share * (dark - pale)) for pale, dark in zip(PALE, DARK, strict=True))
    return f"rgb({red},{green},{blue})"


def _shade_legend(peak: float) -> str:
    left, width = 142, 16
    parts = [words(12, 41, "running requests"), words(left - 8, 41, "1", "end")]
    parts += [
        f'<rect x="{left + width * i}" y="32" width="{width}" height="10" fill="{_shade(i + 1)}"/>'
        for i in range(LEVELS)
    ]
    parts.append(words(left + width * LEVELS + 6, 41, f"{peak:g}; white is idle"))
    return "".join(parts)


def _time_axis(height: int) -> str:
    return words(LEFT + (WIDTH - LEFT - RIGHT) / 2, height - 8, "time (s)", "middle")


def _save(path: Path, height: int, title: str, parts: Sequence[str]) -> None:
    write_whole(path, document(WIDTH, height, title, "".join(parts)).encode())
