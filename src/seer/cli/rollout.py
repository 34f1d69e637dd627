"""`seer rollout`: prompts in, groups of responses with log-probabilities out.

Order of work: read and check all prompts, make the run's folder, start the instances, roll out. Results are
written as groups complete, chunks are journalled as they end, so an interruption of any kind keeps what was
finished: Ctrl-C ends the run politely, and `--resume RUN` continues one that was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
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

if TYPE_CHECKING:
    from seer.api import Rollout
    from seer.runs.prompts import EncodedPrompt

EXIT_INTERRUPTED = 130
EXIT_NOT_CLEAN = 1

EXAMPLES = """\
examples:
  seer rollout --prompts examples/prompts/mixed.jsonl --n 8 --max-tokens 256
  seer rollout --model DIR --prompts p.jsonl --instances 2 --scheduler verl --out results.jsonl
  seer rollout --resume runs/20260101-120000

a line of FILE.jsonl:
  {"prompt": "text"} | {"messages": [{"role": "user", "content": "..."}]} | {"prompt_token_ids": [1, 2]}
  and optionally id, n, seed, max_tokens, temperature, ...
"""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "rollout",
        help="roll prompts out on real instances",
        description="Roll prompts out: n responses each, with log-probabilities, on N instances.",
        epilog=EXAMPLES,
    )
    add_prompt_options(parser, required=False)
    add_fleet_options(parser)
    parser.add_argument("--scheduler", default="seer", metavar="NAME", help="scheduling scheduler (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="results (results.jsonl in the run's folder)")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="the run's folder (runs/ and the time)")
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="continue the run in this folder, as it was asked for"
    )
    parser.add_argument(
        "--verify", type=float, metavar="P", help="score a share P of the responses again during the run"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the verb out."""
    from seer.api import Rollout
    from seer.cli.prompt_file import load_prompts

    if args.resume is not None:
        _restore_arguments(args)
    elif args.prompts is None:
        raise ConfigError("--prompts is missing", hint="--prompts FILE.jsonl, or --resume RUN")
    if args.verify is not None and not 0 < args.verify <= 1:
        raise ConfigError(f"--verify {args.verify:g}", hint="a share of the responses: above 0 and at most 1")
    folder = RunFolder.choose(args.run_dir)
    rollout = Rollout(args.model, scheduler=args.scheduler, **fleet_settings(args, folder.path))
    sampling = sampling_of(args)
    prompts = load_prompts(
        args.prompts, rollout.engine, n=args.n, sampling=sampling, limit=args.limit, skip_bad=args.skip_bad
    )
    folder.create(args.prompts)
    args.run_dir = folder.path
    manifest = {
        "command": "rollout",
        "options": recorded_options(args),
        "machine": machine(),
        "status": "running",
    }
    folder.write_manifest(manifest)
    out = args.out or folder.results
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(b"")  # a resumed run writes the restored responses again
    was_cut = asyncio.run(_roll_out(rollout, prompts, args, folder, out))
    status = "interrupted" if was_cut else "finished"
    summary = rollout.summary
    numbers = _measured(asdict(summary), args.engine) if summary is not None else None
    outcome = {"status": status, "summary": numbers, "lost_instances": rollout.fleet.num_lost}
    verification = _verification_numbers(rollout)
    if verification is not None:
        outcome["verification"] = verification
    folder.write_manifest(folder.read_manifest() | outcome)
    _print_summary(args, folder, out, outcome)
    if was_cut:
        return EXIT_INTERRUPTED
    return 0 if verification is None or verification["is_clean"] else EXIT_NOT_CLEAN


def _verification_numbers(rollout: Rollout) -> dict[str, Any] | None:
    if rollout.verification is None:
        return None
    from seer.cli.verify import numbers_of

    assert rollout.engine.model_dir is not None, "a verification needs a model"
    return numbers_of(rollout.verification, rollout.engine.model_dir)


def _measured(numbers: dict[str, Any], engine: str) -> dict[str, Any]:
    """The summary without what is not known: a zero there would read as a measurement."""
    unknown = () if engine == "local" else ("recomputed_tokens", "migrated_tokens")
    return {key: value for key, value in numbers.items() if key not in unknown and value is not None}


def _restore_arguments(args: argparse.Namespace) -> None:
    folder = RunFolder.find(args.resume)
    options = folder.read_manifest()["options"]
    for key, value in options.items():
        setattr(args, key, Path(value) if key in ("out", "run_dir", "prompts") and value is not None else value)
    args.run_dir = folder.path
    args.prompts = folder.prompts


async def _roll_out(
    rollout: Rollout, prompts: list[EncodedPrompt], args: argparse.Namespace, folder: RunFolder, out: Path
) -> bool:
    """Write results as they come; returns whether the run was cut short."""
    from seer.cli.progress import Progress
    from seer.metrics.jsonl import EventLog
    from seer.runs.results import write_responses

    progress = Progress(rollout, quiet=args.quiet)
    metadata = {"source": "rollout", **recorded_options(args)}
    with EventLog(folder.events, metadata) as log, _interruptible(rollout) as interrupted:
        progress.start()
        try:
            async with rollout:
                _describe_fleet(rollout, folder)
                if interrupted:
                    return True

                def events(event: Any) -> None:
                    log(event)
                    progress.on_event(event)

                groups = rollout.run(
                    prompts,
                    seed=args.seed,
                    events=events,
                    journal=folder.journal,
                    resume=args.resume is not None,
                    verify=args.verify or 0.0,
                )
                async for group in groups:
                    write_responses(out, group.responses)
        finally:
            await progress.stop()
    return bool(interrupted)


def _describe_fleet(rollout: Rollout, folder: RunFolder) -> None:
    limits = rollout.fleet.instances[0].limits
    manifest = folder.read_manifest()
    manifest["limits"] = asdict(limits)
    manifest["model_dir"] = str(rollout.engine.model_dir)
    folder.write_manifest(manifest)


@contextlib.contextmanager
def _interruptible(rollout: Rollout) -> Iterator[list[int]]:
    """The first Ctrl-C cancels the run and keeps what there is; the second is the usual one."""
    interrupted: list[int] = []
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        interrupted.append(1)
        sys.stderr.write("\nstopping; what was generated is kept (again to stop at once)\n")
        loop.remove_signal_handler(signal.SIGINT)
        rollout.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _print_summary(args: argparse.Namespace, folder: RunFolder, out: Path, outcome: dict[str, Any]) -> None:
    status, numbers, verification = outcome["status"], outcome["summary"], outcome.get("verification")
    if args.json:
        shown = {"status": status, "results": str(out), "run": str(folder.path), "summary": numbers}
        if verification is not None:
            shown["verification"] = verification
        sys.stdout.write(json.dumps(shown) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("measure", "value", title=f"{args.scheduler} on {args.instances} instances, {status}")
    for name, value in (numbers or {}).items():
        table.add_row(name.replace("_", " "), f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    console = Console(soft_wrap=True)
    if verification is not None:
        verdict = "clean" if verification["is_clean"] else "NOT CLEAN"
        table.add_row("verification", f"{verdict}, {verification['num_responses']:,} responses scored again")
    console.print(table)
    console.print(f"results  {out}\nrun      {folder.path}", highlight=False)
    if status == "interrupted":
        console.print(f"continue with: seer rollout --resume {folder.path}", highlight=False)
