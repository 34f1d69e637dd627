"""`seer compare`: the same prompts, seeds and instances under several schedulers; a table, and a report.

The first scheduler is the one that speedups are relative to. `oracle` is the makespan of an ideal schedule
(src/seer/analysis/explain.py) for the lengths that came out, at the step cost that was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seer.cli.rollout_options import (
    add_fleet_options,
    add_prompt_options,
    fleet_settings,
    recorded_options,
    sampling_of,
)
from seer.errors import ConfigError
from seer.runs.run_folder import RunFolder, machine
from seer.scheduling.registry import parse_scheduler

if TYPE_CHECKING:
    from seer.analysis.comparison import Comparison, Measured
    from seer.api import Rollout
    from seer.metrics.events import Event
    from seer.metrics.jsonl import EventLog
    from seer.runs.prompts import EncodedPrompt
    from seer.types import GroupResult

EXAMPLES = """\
examples:
  seer compare --prompts examples/prompts/mixed.jsonl --schedulers verl-sync,verl,seer --repeat 3
  seer compare --prompts p.jsonl --lengths runs/20260101-120000      the lengths of a recorded run
"""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "compare",
        help="several schedulers on the same prompts, seeds and instances",
        description="Run the same prompts and seeds under several schedulers on the same instances,\n"
        "repeated and interleaved, and print what each came to.",
        epilog=EXAMPLES,
    )
    add_prompt_options(parser)
    add_fleet_options(parser)
    parser.add_argument("--schedulers", default="verl-sync,verl,seer", metavar="A,B,...", help="(%(default)s)")
    parser.add_argument("--repeat", type=int, default=1, metavar="R", help="runs of each scheduler (%(default)s)")
    parser.add_argument(
        "--lengths",
        default="natural",
        metavar="natural|RUN",
        help="as they come, or forced to a recorded run's",
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where everything is kept (runs/ and the time)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the verb out."""
    from seer.analysis.comparison import recorded_lengths
    from seer.api import Rollout
    from seer.cli.prompt_file import load_prompts

    schedulers = [name.strip() for name in args.schedulers.split(",") if name.strip()]
    for scheduler in schedulers:
        parse_scheduler(scheduler)
    if not schedulers or args.repeat < 1:
        raise ConfigError(f"{len(schedulers)} schedulers, {args.repeat} repetitions", hint="at least one of each")
    folder = RunFolder.choose(args.run_dir)
    rollout = Rollout(args.model, **fleet_settings(args, folder.path))
    sampling = sampling_of(args)
    prompts = load_prompts(
        args.prompts, rollout.engine, n=args.n, sampling=sampling, limit=args.limit, skip_bad=args.skip_bad
    )
    lengths = (
        None if args.lengths == "natural" else recorded_lengths(RunFolder.find(Path(args.lengths)).results, prompts)
    )
    folder.create(args.prompts)
    args.run_dir = folder.path
    recorder = _Recorder(folder, args, rollout, forced=lengths is not None)
    comparison = asyncio.run(_compare(rollout, prompts, schedulers, lengths=lengths, args=args, recorder=recorder))
    rows = comparison.rows()
    folder.write_manifest(
        {
            "command": "compare",
            "options": recorded_options(args),
            "machine": machine(),
            "status": "finished",
            "rows": rows,
            "runs": [_run_numbers(one) for one in comparison.runs],
        }
    )
    report = recorder.write_report(rows)
    if args.json:
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        _print_table(rows, args, folder, report)
    return 0


async def _compare(
    rollout: Rollout,
    prompts: list[EncodedPrompt],
    schedulers: list[str],
    *,
    lengths: list[list[int]] | None,
    args: argparse.Namespace,
    recorder: _Recorder,
) -> Comparison:
    from seer.analysis.comparison import compare

    with recorder:
        async with rollout:
            return await compare(
                rollout,
                prompts,
                schedulers,
                repetitions=args.repeat,
                seed=args.seed,
                lengths=lengths,
                began=recorder.began,
                ended=recorder.ended,
            )


class _Recorder:
    """Keeps each run in a folder of its own inside the comparison's, and says what is going on."""

    def __init__(self, folder: RunFolder, args: argparse.Namespace, rollout: Rollout, *, forced: bool) -> None:
        self._folder = folder
        self._args = args
        self._rollout = rollout
        self._forced = forced
        self._open = ExitStack()
        self._log: EventLog | None = None
        self._run: RunFolder | None = None

    def __enter__(self) -> _Recorder:
        self._say("starting the instances")
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def began(self, repetition: int, scheduler: str) -> Callable[[Event], None]:
        """A run begins: the sink of its events."""
        from seer.metrics.jsonl import EventLog

        self._run = RunFolder(self._folder.path / f"{scheduler}-{repetition}")
        self._run.create(self._folder.prompts)
        options = recorded_options(self._args) | {
            "scheduler": scheduler,
            "out": None,
            "run_dir": str(self._run.path),
        }
        limits = self._rollout.fleet.instances[0].limits
        self._run.write_manifest(
            {
                "command": "rollout",
                "options": options,
                "machine": machine(),
                "status": "running",
                "limits": asdict(limits),
                "model_dir": str(self._rollout.engine.model_dir),
                "forced_lengths": self._forced,
            }
        )
        self._log = self._open.enter_context(EventLog(self._run.events, {"source": "compare", **options}))
        self._say(f"run {repetition + 1} of {self._args.repeat}, {scheduler}")
        return self._log

    def ended(self, measured: Measured, groups: list[GroupResult]) -> None:
        """A run is over."""
        from seer.runs.results import write_responses

        assert self._run is not None, "a run ended that had not begun"
        self._open.close()
        self._run.results.write_bytes(b"")
        for group in sorted(groups, key=lambda one: one.group):
            write_responses(self._run.results, group.responses)
        manifest = self._run.read_manifest()
        self._run.write_manifest(manifest | {"status": "finished", "summary": asdict(measured.summary)})
        rate, makespan_s, tail_s = (
            getattr(measured.summary, name) for name in ("throughput_tokens_s", "makespan_s", "tail_s")
        )
        self._say(f"  {rate:.1f} tokens/s, {makespan_s:.1f} s, tail {tail_s:.1f} s")

    def write_report(self, rows: list[dict[str, Any]]) -> Path | None:
        """The report of the last scheduler's first run, beside all rows."""
        from seer.report.page import write_page

        best = RunFolder(self._folder.path / f"{rows[-1]['scheduler']}-0")
        others = [RunFolder(self._folder.path / f"{row['scheduler']}-0") for row in rows[:-1]]
        return write_page(best, self._folder.report, rows=rows, others=others)

    def _say(self, text: str) -> None:
        if not self._args.quiet:
            sys.stderr.write(f"{text}\n")


def _run_numbers(measured: Measured) -> dict[str, Any]:
    explanation = measured.explanation
    return {
        "scheduler": measured.scheduler,
        "repetition": measured.repetition,
        "summary": asdict(measured.summary),
        "explanation": asdict(explanation) if explanation is not None else None,
        "different_responses": measured.num_different,
    }


def _print_table(rows: list[dict[str, Any]], args: argparse.Namespace, folder: RunFolder, report: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    lengths = "natural lengths" if args.lengths == "natural" else "forced lengths"
    title = (
        f"{first['num_requests']} responses, {first['num_tokens']:,} tokens, {lengths}, "
        f"{args.instances} instances, median of {args.repeat}"
    )
    table = Table(title=title)
    for name in (
        "scheduler",
        "tokens/s",
        "spread",
        "speedup",
        "makespan",
        "tail",
        "idle",
        "migr.",
        "preempt.",
        "accepted",
    ):
        table.add_column(name, justify="left" if name == "scheduler" else "right")
    table.add_column("oracle estimate", justify="right")
    table.add_column("tokens", justify="right")
    for row in rows:
        drafted = f" of {row['drafted_tokens']:,.0f}" if row["drafted_tokens"] else ""
        bound = f"{row['oracle_s']:.1f} s, {100 * row['oracle_share']:.0f}%" if row["oracle_s"] is not None else "-"
        table.add_row(
            row["scheduler"],
            f"{row['throughput_tokens_s']:.1f}",
            f"{row['throughput_min']:.1f}-{row['throughput_max']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['makespan_s']:.1f} s",
            f"{row['tail_s']:.1f} s",
            f"{100 * row['idle_share']:.0f}%",
            f"{row['migrations']:.0f}",
            f"{row['preemptions']:.0f}",
            f"{row['accepted_tokens']:,.0f}{drafted}",
            bound,
            "identical" if not row["different_responses"] else f"{row['different_responses']} differ",
        )
    # Into a file or a pipe the table keeps its columns.
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(
        "oracle estimate: makespan with all lengths known, longest remaining first, moves and prompts free,\n"
        "no speculation, at the step cost measured in each scheduler's own run; share = bound / makespan.",
        highlight=False,
    )
    console.print(f"runs     {folder.path}\nreport   {report or '-'}", highlight=False)
