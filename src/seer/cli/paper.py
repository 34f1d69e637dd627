# SPDX-License-Identifier: Apache-2.0
"""`seer paper`: the paper's tables beside ours, with the error of every cell."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from seer.cli.number_option import NumberOption
from seer.cli.seeds import parse_seeds
from seer.cli.wide_console import wide_console
from seer.ranges import Threads
from seer.sim.paper import SHARES, WORKLOADS, CellResult, Measure, Study, answer, claims, run_jobs

EXAMPLES = """\
examples:
  seer paper                     about ten minutes on two cores
  seer paper --seeds 0           one arrangement of the groups: under a minute
  seer paper --json > paper.json
"""
TITLES: dict[Study, str] = {
    "table 4": "Table 4: throughput over veRL as mechanisms are added",
    "figure 7": "Figure 7: throughput over veRL, groups of 8 and 16",
    "figure 8": "Figure 8: total and tail seconds, what is left of veRL's tail, and when groups were complete",
    "context": "Length context: over veRL and the oracles, without speculation",
    "first version": "First version of the paper: its stated ranges, and ours",
}
MEASURES: dict[Measure, str] = {
    "speedup": "",
    "total_s": "total s",
    "tail_s": "tail s",
    "tail_share": "tail left",
    "oracle_share": "of oracle",
    "bar_share": "of seer-oracle",
    "group_median_s": "half of the groups s",
    "group_p90_s": "90% of the groups s",
    "group_last_s": "all groups s",
}


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "paper",
        help="print the paper's tables beside ours",
        description="Simulate the paper's evaluation and print its numbers beside ours.\n"
        "The cost model is fitted to what the paper measured on veRL: its rows of Figure 8, and Figure 11. The other\n"
        "rows are not fitted (docs/design/0002-simulator.md).",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--seeds", default="0..15", metavar="S,...", help="arrangements to average: 0,1,2 or 0..15 (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print a list of cells instead of tables")
    parser.add_argument(
        "--processes",
        type=NumberOption(Threads),
        default=os.cpu_count() or 1,
        metavar="N",
        help="simulations at once (%(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate what the tables need, and print them."""
    seeds = parse_seeds(args.seeds)
    wanted = claims()
    jobs = list(dict.fromkeys(job for claim in wanted for seed in seeds for job in claim.jobs(seed)))
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("simulating", total=len(jobs))
        results = run_jobs(jobs, num_processes=args.processes, progress=lambda job: bars.advance(bar))
    answers = [answer(claim, results, seeds) for claim in wanted]
    if args.json:
        cells = [{**asdict(a.claim), **{k: v for k, v in asdict(a).items() if k != "claim"}} for a in answers]
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(cells), indent=2) + b"\n")
        sys.stdout.flush()
    else:
        print_studies(wide_console(150), answers, seeds)
    return 0


def print_studies(console: Console, answers: Sequence[CellResult], seeds: Sequence[int]) -> None:
    """A table per study: the paper's number, ours, and the error."""
    for study, title in TITLES.items():
        console.print(_table(title, [a for a in answers if a.claim.study == study]))
    goals = [a for a in answers if a.within_goal is not None]
    met = sum(bool(a.within_goal) for a in goals)
    console.print(
        "Each cell: paper, ours, half of the 95% interval of our mean (error). Calibrated: veRL's total and tail "
        "seconds, marked *.\n"
        f"Goals (10%; 8 points for shares, and for tail seconds as a share of veRL's): {met} of {len(goals)} cells "
        f"meet theirs; misses are red and marked !. Mean over seeds {', '.join(map(str, seeds))}.",
        highlight=False,
    )


def _table(title: str, answers: Sequence[CellResult]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for workload in WORKLOADS:
        table.add_column(workload, justify="right")
    rows: dict[tuple[str, int, Measure], dict[str, CellResult]] = {}
    with_sizes = len({(a.claim.workload, a.claim.group_size) for a in answers}) > len(WORKLOADS)
    for a in answers:
        size = a.claim.group_size if with_sizes else 0
        rows.setdefault((a.claim.row, size, a.claim.measure), {})[a.claim.workload] = a
    for (row, size, measure), cells in rows.items():
        first = next(iter(cells.values()))
        name = f"{row} ({first.claim.scheduler})"
        name += f", G={size}" if size else ""
        name += f", {MEASURES[measure]}" if MEASURES[measure] else ""
        name += f": {first.claim.stated}" if first.claim.stated else ""
        table.add_row(name, *(_cell(cells[workload]) for workload in WORKLOADS))
    return table


def _cell(a: CellResult) -> Text:
    measure = a.claim.measure
    is_share = measure in SHARES
    shown = "{:,.0f}" if measure.endswith("_s") else ("{:.0%}" if is_share else "{:.2f}")
    text = shown.format(a.ours)
    if a.half_width:
        text += f" ±{shown.format(a.half_width).removesuffix('%')}"
    if a.claim.paper is None or a.error is None:
        return Text(text)
    error = f"{100 * a.error:+.0f}" + (" points" if is_share else "%")
    mark = "*" if a.claim.calibrated else ("!" if a.within_goal is False else " ")
    style = "red" if a.within_goal is False else ("dim" if a.claim.calibrated else "")
    return Text(f"{shown.format(a.claim.paper)}  {text} ({error}){mark}", style=style)
