# SPDX-License-Identifier: Apache-2.0
"""`seer compare`: the same prompts, seeds and instances under several schedulers; a table, and a report.

Speedups are relative to the first scheduler. `oracle` is the makespan of an ideal schedule
(src/seer/analysis/explain.py) for the lengths of the responses, at the measured step cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from seer.cli.failures import Failures
from seer.cli.rollout_options import add_config_options, add_key, add_prompt_options, add_rollout_options, names_of
from seer.cli.run_config import carry_out, read_run, recorded
from seer.cli.run_status import status_of_failure
from seer.cli.signals import exit_code, signals_cancel
from seer.config import RunConfig
from seer.config.run import NATURAL_LENGTHS
from seer.errors import ConfigError
from seer.runs.manifest import recorded_limits
from seer.runs.run_folder import RunFolder, machine

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
  seer compare --preset cpu-demo --prompts examples/prompts/mixed.jsonl          what `make demo` runs
  seer compare --prompts p.jsonl --lengths runs/20260101-120000      repeat the lengths of a recorded run
  seer compare --config run.toml --repeat 3                          options override the file

exit codes:
  0    every response ended by itself
  1    a response failed, or the comparison failed
  2    wrong arguments or files; nothing was started
  130  interrupted with Ctrl-C; 143 by SIGTERM, 129 by SIGHUP
"""

EXIT_FAILED = 1


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "compare",
        help="compare schedulers on the same prompts, seeds and instances",
        description="Run the same prompts and seeds under several schedulers on the same instances,\n"
        "repeated and interleaved, and print throughput, makespan and tail of each.",
        epilog=EXAMPLES,
    )
    add_config_options(parser)
    add_prompt_options(parser)
    add_rollout_options(parser)
    schedulers = "schedulers to compare; speedups are relative to the first"
    add_key(parser, "--schedulers", "compare.schedulers", type=names_of, metavar="A,B,...", help=schedulers)
    add_key(parser, "--repeat", "compare.repeat", type=int, metavar="R", help="runs of each scheduler")
    lengths = "natural, or a recorded run whose response lengths are repeated"
    add_key(parser, "--lengths", "compare.lengths", metavar="natural|RUN", help=lengths)
    parser.add_argument("--force", action="store_true", help="replace an earlier run in --run-dir")
    parser.add_argument("--json", action="store_true", help="print the rows, or the dry run, as JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the verb out."""
    config = read_run(args)
    if config.environment is not None:
        raise ConfigError("seer compare has no environments", hint="leave environment out, or use seer rollout")
    return carry_out(config, args, lambda folder, located: _run_in(folder, located, args))


def _run_in(folder: RunFolder, config: RunConfig, args: argparse.Namespace) -> int:
    """Compare in a folder that no other driver writes to."""
    from seer.analysis.comparison import recorded_lengths
    from seer.api import Rollout
    from seer.cli.prompt_file import load_prompts
    from seer.runs.overwriting import refuse_earlier_run

    rollout = Rollout(config.rollout)
    prompts = load_prompts(config, rollout.engine)
    lengths = None
    if config.compare.lengths != NATURAL_LENGTHS:
        lengths = recorded_lengths(RunFolder.find(Path(config.compare.lengths)).results, prompts)
    if not args.force:
        refuse_earlier_run(folder, config.prompts)
    folder.create(config.prompts)
    recorder = _Recorder(folder, config, rollout, forced=lengths is not None, quiet=args.quiet)
    comparison = asyncio.run(_compare(rollout, prompts, config, lengths=lengths, recorder=recorder))
    if isinstance(comparison, int):
        return exit_code(comparison)
    rows = [row | {"num_failed": recorder.num_failed[row["scheduler"]]} for row in comparison.rows()]
    folder.write_manifest(
        {
            "command": "compare",
            **recorded(config),
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
        _print_table(rows, config, folder, report)
    recorder.failures.report(hint=f"the results in {folder.path} have the error of each")
    return EXIT_FAILED if recorder.failures.num_failed else 0


async def _compare(
    rollout: Rollout,
    prompts: list[EncodedPrompt],
    config: RunConfig,
    *,
    lengths: list[list[int]] | None,
    recorder: _Recorder,
) -> Comparison | int:
    """All runs; the number of a signal if that ended them."""
    from seer.analysis.comparison import compare

    with signals_cancel(rollout, keeps_run=False) as interruption:
        try:
            with recorder:
                async with rollout:
                    return await compare(
                        rollout,
                        prompts,
                        list(config.compare.schedulers),
                        repetitions=config.compare.repeat,
                        seed=config.seed,
                        lengths=lengths,
                        began=recorder.began,
                        ended=recorder.ended,
                    )
        except asyncio.CancelledError:
            if interruption.number is None or not interruption.swallow():
                raise
            return interruption.number


class _Recorder:
    """Keeps each run in a folder of its own inside the comparison's, and says what is going on."""

    def __init__(self, folder: RunFolder, config: RunConfig, rollout: Rollout, *, forced: bool, quiet: bool) -> None:
        self._folder = folder
        self._config = config
        self._rollout = rollout
        self._forced = forced
        self._is_quiet = quiet
        self.failures = Failures()
        self.num_failed: Counter[str] = Counter()
        """Responses that failed, by scheduler, over all repetitions."""
        self._open = ExitStack()
        self._log: EventLog | None = None
        self._run: RunFolder | None = None

    def __enter__(self) -> _Recorder:
        self._say("starting the instances")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def began(self, repetition: int, scheduler: str) -> Callable[[Event], None]:
        """A run begins: the sink of its events."""
        from seer.metrics.jsonl import EventLog

        self._run = RunFolder(self._folder.path / f"{scheduler}-{repetition}")
        self._run.create(self._folder.prompts)
        rollout = replace(self._config.rollout, scheduler=scheduler)
        asked = recorded(replace(self._config, out=None, run_dir=self._run.path, rollout=rollout))
        self._run.write_manifest(
            {
                "command": "rollout",
                **asked,
                "machine": machine(),
                "status": "running",
                **recorded_limits(self._rollout.fleet.limits),
                "model_dir": str(self._rollout.engine.model_dir),
                "forced_lengths": self._forced,
            }
        )
        self._open.enter_context(status_of_failure(self._run))
        self._log = self._open.enter_context(EventLog(self._run.events, {"source": "compare", **asked["options"]}))
        self._say(f"run {repetition + 1} of {self._config.compare.repeat}, {scheduler}")
        return self._log

    def ended(self, measured: Measured, groups: list[GroupResult]) -> None:
        """A run is over."""
        from seer.runs.results import ResultsFile

        assert self._run is not None, "a run ended that had not begun"
        self._open.close()
        with ResultsFile(self._run.results, replace=True) as results:
            for group in sorted(groups, key=lambda one: one.group):
                results.write(group.responses)
        num_before = self.failures.num_failed
        for group in groups:
            self.failures.count(group.responses)
        num_failed = self.failures.num_failed - num_before
        self.num_failed[measured.scheduler] += num_failed
        manifest = self._run.read_manifest()
        self._run.write_manifest(
            manifest | {"status": "finished", "summary": asdict(measured.summary), "num_failed": num_failed}
        )
        rate, makespan_s, tail_s = (
            getattr(measured.summary, name) for name in ("throughput_tokens_s", "makespan_s", "tail_s")
        )
        self._say(f"  {rate:.1f} tokens/s, {makespan_s:.1f} s, tail {tail_s:.1f} s")

    def write_report(self, rows: list[dict[str, Any]]) -> Path:
        """The report of the last scheduler's first run, beside all rows."""
        from seer.machine.whole_files import write_whole
        from seer.report.page import page_text

        best = RunFolder(self._folder.path / f"{rows[-1]['scheduler']}-0")
        others = [RunFolder(self._folder.path / f"{row['scheduler']}-0") for row in rows[:-1]]
        write_whole(self._folder.report, page_text(best, rows=rows, others=others).encode())
        return self._folder.report

    def _say(self, text: str) -> None:
        if not self._is_quiet:
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


def _accepted(row: dict[str, Any]) -> str:
    drafted = f" of {row['drafted_tokens']:,.0f}" if row["drafted_tokens"] else ""
    return f"{row['accepted_tokens']:,.0f}{drafted}"


def _oracle(row: dict[str, Any]) -> str:
    return "-" if row["oracle_s"] is None else f"{row['oracle_s']:.1f} s, {100 * row['oracle_share']:.0f}%"


def _tokens(row: dict[str, Any]) -> str:
    return f"{row['different_responses']} differ" if row["different_responses"] else "identical"


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("scheduler", lambda row: str(row["scheduler"])),
    ("tokens/s", lambda row: f"{row['throughput_tokens_s']:.1f}"),
    ("spread", lambda row: f"{row['throughput_min']:.1f}-{row['throughput_max']:.1f}"),
    ("speedup", lambda row: f"{row['speedup']:.2f}x"),
    ("makespan", lambda row: f"{row['makespan_s']:.1f} s"),
    ("tail", lambda row: f"{row['tail_s']:.1f} s"),
    ("idle", lambda row: f"{100 * row['idle_share']:.0f}%"),
    ("migr.", lambda row: f"{row['migrations']:.0f}"),
    ("preempt.", lambda row: f"{row['preemptions']:.0f}"),
    ("accepted", _accepted),
    ("oracle estimate", _oracle),
    ("tokens", _tokens),
    ("failed", lambda row: f"{row['num_failed']:,}"),
)
"""Of the table: each column's name, and its cell of a scheduler's row."""


def _print_table(rows: list[dict[str, Any]], config: RunConfig, folder: RunFolder, report: Path) -> None:
    from rich.table import Table

    from seer.cli.wide_console import wide_console

    first = rows[0]
    lengths = "natural lengths" if config.compare.lengths == NATURAL_LENGTHS else "forced lengths"
    title = (
        f"{first['num_requests']} responses, {first['num_tokens']:,} tokens, {lengths}, "
        f"{config.rollout.instances} instances, median of {config.compare.repeat}"
    )
    table = Table(title=title)
    for name, _ in COLUMNS:
        table.add_column(name, justify="left" if name == "scheduler" else "right")
    for row in rows:
        table.add_row(*(cell(row) for _, cell in COLUMNS))
    console = wide_console(160, soft_wrap=True)
    console.print(table)
    console.print(
        "oracle estimate: makespan with all lengths known, longest remaining first, moves and prompts free,\n"
        "no speculation, at the step cost measured in each scheduler's own run; share = estimate / makespan.",
        highlight=False,
    )
    console.print(f"runs     {folder.path}\nreport   {report}", highlight=False)
