# SPDX-License-Identifier: Apache-2.0
"""`seer report`'s page: one HTML file with everything inline, readable without a network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from seer.analysis.tool_waits import median_s, most_at_once, total_s
from seer.machine.sizes import show_size
from seer.report import charts
from seer.report.html_table import html_table
from seer.report.run_data import RunData, read_run
from seer.runs.run_folder import RunFolder

STYLE = """
:root{--ink:#1d2126;--soft:#5c6670;--line:#e3e6ea;--paper:#fff;--card:#f6f7f9}
@media(prefers-color-scheme:dark){
:root{--ink:#e7eaee;--soft:#9aa3ad;--line:#333a42;--paper:#15181c;--card:#1e2329}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
max-width:1120px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2.2rem 0 .3rem}
p{margin:.3rem 0}.soft{color:var(--soft)}
.cards{display:flex;flex-wrap:wrap;gap:.6rem;margin:1.2rem 0}
.card{background:var(--card);border-radius:8px;padding:.6rem .9rem;min-width:7.5rem}
.card b{display:block;font-size:1.25rem;font-variant-numeric:tabular-nums}
.card span{color:var(--soft);font-size:.82rem}
svg{width:100%;height:auto;display:block;margin:.3rem 0}
.grid{stroke:var(--line);stroke-width:1}.tick,.unit,.label{fill:var(--soft);font-size:11px}
.tail{fill:#c8503c;opacity:.09}.bound{stroke:var(--ink);stroke-width:2;stroke-dasharray:3 2}
.legend{font-size:.85rem;color:var(--soft)}.legend span{margin-right:1rem;white-space:nowrap}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em;
vertical-align:-1px}
.legend i.bound{width:0;border-left:2px dashed var(--ink);background:none;border-radius:0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{text-align:right;padding:.3rem .5rem;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500}th:first-child,td:first-child{text-align:left}
"""

NO_CONTENT_FROM_ELSEWHERE = "default-src 'none'; style-src 'unsafe-inline'"
"""For the browser: run no script and load nothing. All text is escaped as well."""
SPLIT_NOTE = (
    "Mean over the instances; the headings add up to the makespan. The dashed mark is the oracle estimate: "
    "lengths known, longest remaining first, moves and prompts for free, no speculation, at the measured "
    "step cost."
)
TIMELINE_NOTE = (
    "A bar is a chunk, a colour is a prompt; thin grey is waiting or prefill; red outlines: the last tenth "
    "of the responses, and the shaded time is the tail. Pale bars below the instances are requests that wait for their "
    "tools, on no instance; a red one failed. Rest the mouse on a bar for details."
)
SIDE_BY_SIDE_NOTE = (
    "Each row has the medians over all runs of a scheduler. All other numbers and plots are of a scheduler's first "
    "run; from the timeline on, of {} alone."
)

COLUMNS = (
    ("scheduler", "scheduler", "{}"),
    ("throughput_tokens_s", "tokens/s", "{:.1f}"),
    ("speedup", "speedup", "{:.2f}x"),
    ("makespan_s", "makespan s", "{:.1f}"),
    ("tail_s", "tail s", "{:.1f}"),
    ("idle_share", "idle", "{:.0%}"),
    ("migrations", "migrations", "{:.0f}"),
    ("preemptions", "preemptions", "{:.0f}"),
    ("accepted_tokens", "accepted drafts", "{:,.0f}"),
    ("oracle_s", "oracle estimate s", "{:.1f}"),
    ("oracle_share", "oracle / makespan", "{:.0%}"),
    ("different_responses", "responses that differ", "{}"),
)


def page_text(
    folder: RunFolder,
    *,
    rows: Sequence[dict[str, Any]] = (),
    others: Sequence[RunFolder] = (),
    training: str = "",
) -> str:
    """The page of a run; `rows` and `others` set it beside the runs it was compared with.

    `training` is the section on the training run that this rollout was part of.
    """
    return render(read_run(folder), rows, [read_run(other) for other in others], training)


def render(
    run: RunData, rows: Sequence[dict[str, Any]] = (), others: Sequence[RunData] = (), training: str = ""
) -> str:
    """The page as text."""
    runs = [*others, run]
    options, machine = run.manifest.options, run.manifest.machine
    num_responses = len(run.ended)
    sections = [
        f"<h1>{escape(run.title)}: {len(set(run.group_of.values()))} prompts, {num_responses} responses</h1>",
        f'<p class="soft">{escape(str(options.model))} on {run.num_instances} instances of the '
        f"{escape(str(options.engine))} engine, {_at_once(run)} requests at once each; "
        f"{escape(machine.cpu)}, {machine.cores or '?'} cores</p>",
        _cards(run),
        training,
    ]
    if rows:
        note = f'<p class="soft">{SIDE_BY_SIDE_NOTE.format(escape(run.title))}</p>'
        sections.append("<h2>Schedulers side by side</h2>" + note + _table(rows))
    sections += [
        "<h2>Responses ended over time</h2>",
        '<p class="soft">A line that climbs early and stays short of the top has a tail.</p>',
        charts.line_legend([one.title for one in runs]),
        charts.finishes(runs),
        "<h2>Where did the time go?</h2>",
        f'<p class="soft">{SPLIT_NOTE}</p>',
        charts.split_legend(),
        charts.splits(runs),
        _split_table(runs),
        "<h2>Timeline</h2>",
        f'<p class="soft">{TIMELINE_NOTE}</p>',
        charts.timeline(run),
        charts.tools(run) if run.tool_waits else "",
        "<h2>Running requests</h2>",
        charts.line_legend([f"instance {i}" for i in range(run.num_instances)]),
        charts.running(run),
        "<h2>KV memory in use</h2>",
        charts.kv_use(run),
        "<h2>KV pool</h2>",
        _pool(run),
        "<h2>Drafts</h2>",
        '<p class="soft">Draft tokens verified per second (grey) and accepted (coloured by instance).</p>',
        charts.drafts(run),
        "<h2>The last to finish</h2>",
        _last_to_finish(run),
    ]
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{NO_CONTENT_FROM_ELSEWHERE}">'
        f"<title>Seer report: {escape(run.title)}</title>"
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
    )
    body = "".join(sections)
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _at_once(run: RunData) -> str:
    fewest, most = (choose(one.max_num_seqs for one in run.limits) for choose in (min, max))
    return f"{fewest}" if fewest == most else f"{fewest} to {most}"


def _cards(run: RunData) -> str:
    number, explanation = run.manifest.number, run.explanation
    shown = [
        ("tokens per second", f"{number('throughput_tokens_s'):.1f}"),
        ("tokens", f"{number('num_tokens'):,}"),
        ("makespan", f"{run.makespan_s:.1f} s"),
        ("tail (last tenth)", f"{run.makespan_s - run.tail_from_s:.1f} s"),
        ("instances idle", f"{number('idle_share'):.0%}"),
        ("migrations", f"{number('migrations'):,}"),
        ("preemptions", f"{number('preemptions'):,}"),
    ]
    if explanation is not None:
        shown.append(("drafts accepted", f"{explanation.num_accepted:,} of {explanation.num_drafted:,}"))
        if explanation.oracle_s is not None:
            shown.append(("oracle estimate", f"{explanation.oracle_s:.1f} s"))
    if run.leases is not None:
        leases = run.leases
        shown.append(("leases extended, chunks parked", f"{leases.num_extended:,}, {leases.num_parked:,}"))
        shown.append(("gap of an extension (p99)", f"{1e3 * leases.p99_gap_s:.1f} ms"))
        if leases.kv_use is not None:
            shown.append(("KV memory in use while requests wait", f"{leases.kv_use:.0%}"))
    if run.tool_waits:
        waits = run.tool_waits
        shown.append(("turns that waited for tools", f"{len(waits):,}"))
        shown.append(("waited for tools, all together; median", f"{total_s(waits):,.1f} s; {median_s(waits):.2f} s"))
        shown.append(("waited for tools at once, at most", f"{most_at_once(waits):,}"))
        shown.append(("tool failures", f"{sum(one.has_failed for one in waits):,}"))
    if run.dropped:
        wasted = (
            f"{sum(one.num_tokens for one in run.dropped):,} tokens, {sum(one.request_s for one in run.dropped):,.1f} s"
        )
        shown.append((f"wasted on {len(run.dropped):,} groups that were dropped", wasted))
    verification = run.manifest.verification
    if verification is not None:
        verdict = "clean" if verification.is_clean else "NOT CLEAN"
        shown.append((f"verification, {verification.num_responses:,} responses scored again", verdict))
    cards = (f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in shown)
    return f'<div class="cards">{"".join(cards)}</div>'


def _pool(run: RunData) -> str:
    """KV loaded from the pool and computed again, and the pool's errors."""
    if run.manifest.options.pool == "none":
        return '<p class="soft">No pool: KV that an instance lacked was computed again.</p>'
    failed = sum(one.num_failed for one in run.pool_errors)
    corrupt = sum(one.num_corrupt for one in run.pool_errors)
    recomputed = sum(one.num_recomputed for one in run.pool_errors)
    moved = f"{run.num_loaded_tokens:,} tokens' KV loaded, {run.num_recomputed_tokens:,} tokens computed again"
    moved += _nodes(run) + _ssd(run)
    unsaved = sum(step.num_unsaved_blocks for steps in run.steps for step in steps)
    if unsaved:
        moved += f"; {unsaved:,} blocks were not saved, because the pool was slower than the engine may wait"
    if not run.pool_errors:
        return f'<p class="soft">{moved}; the pool never failed.</p>'
    return (
        f"<p>{moved}.</p><p><b>The pool failed:</b> {failed:,} calls or blocks not served, {corrupt:,} damaged blocks "
        f"found and dropped; {recomputed:,} tokens computed again because of that. No response was affected.</p>"
    )


def _nodes(run: RunData) -> str:
    """How many moves stayed inside a node, where there were several."""
    moves = [(one.migrated_from, one.instance) for one in run.chunks if one.migrated_from is not None]
    if len(set(run.node_of.values())) < 2 or not moves:
        return ""
    inside = sum(run.node_of.get(before) == run.node_of.get(now) for before, now in moves)
    loaded = sum(one.loaded_bytes for some in run.steps for one in some)
    far = sum(one.far_loaded_bytes for some in run.steps for one in some)
    crossed = f"{show_size(far)} of {show_size(loaded)} came from other nodes"
    return f"; {inside:,} of {len(moves):,} moves stayed inside a node, {crossed}"


def _ssd(run: RunData) -> str:
    """What the pool's SSD tier did, if it did anything."""
    written, read = (
        sum(getattr(one, name) for one in run.pool_used) for name in ("ssd_written_bytes", "ssd_read_bytes")
    )
    refused = sum(one.num_refused for one in run.pool_used)
    said = f"; {show_size(written)} written to SSD, {show_size(read)} read from it" if written or read else ""
    return said + (f"; {refused:,} blocks found no room in the pool" if refused else "")


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = ([form.format(row[key]) if row.get(key) is not None else "-" for key, _, form in COLUMNS] for row in rows)
    return html_table([name for _, name, _ in COLUMNS], cells)


def _split_table(runs: Sequence[RunData]) -> str:
    explained = [(run.title, run.explanation) for run in runs if run.explanation is not None]
    if not explained:
        return ""
    headings = list(explained[0][1].seconds)
    rows = ([title, *(f"{e.seconds[heading]:.2f}" for heading in headings)] for title, e in explained)
    return html_table(["scheduler", *(f"{heading} s" for heading in headings)], rows)


def _last_to_finish(run: RunData, num_shown: int = 10) -> str:
    """The responses that ended last: what made the tail."""
    latest = sorted(run.ended.items(), key=lambda item: -item[1][0])[:num_shown]
    rows = []
    for request, (end_s, num_tokens, finish_reason) in latest:
        chunks = [one for one in run.chunks if one.request == request]
        first_s = min((one.from_s for one in chunks), default=0.0)
        moves = sum(one.migrated_from is not None for one in chunks)
        at_tools_s = total_s([one for one in run.tool_waits if one.request == request])
        rested_s = end_s - first_s - sum(one.to_s - one.from_s for one in chunks) - at_tools_s
        rows.append(
            [
                f"prompt {run.group_of[request]}, response {run.index_of[request]}",
                f"{num_tokens}",
                finish_reason,
                f"{first_s:.1f}",
                f"{end_s:.1f}",
                f"{len(chunks)}",
                f"{moves}",
                f"{max(0.0, rested_s):.1f}",
                f"{at_tools_s:.1f}",
            ]
        )
    names = (
        "response",
        "tokens",
        "end",
        "started s",
        "ended s",
        "chunks",
        "moves",
        "rested between chunks s",
        "waited for tools s",
    )
    return html_table(names, rows)
