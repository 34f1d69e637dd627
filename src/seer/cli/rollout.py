# SPDX-License-Identifier: Apache-2.0
"""`seer rollout`: prompts in, groups of responses with log-probabilities out.

Order of work: lock the run's folder, read and check all prompts, check that nothing is lost, start the instances, roll
out. Results are written as groups complete, chunks are journalled as they end, so an interruption of any kind keeps
what was finished: Ctrl-C and SIGTERM end the run and keep its results, and `--resume RUN` continues one that was
killed. Where nothing is left of it, what was measured stays: the summary and the event log are not those of a part that
generated nothing, and nothing is started unless results have to be written again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seer.cli.resumed import read_resumed, resume_command
from seer.cli.rollout_options import (
    CONFIG_PREFIX,
    add_config_options,
    add_key,
    add_prompt_options,
    add_rollout_options,
)
from seer.cli.run_config import carry_out, read_run, recorded
from seer.cli.run_status import status_of_failure
from seer.cli.signals import exit_code, signals_cancel
from seer.cli.watching import add_watch_options, refuse_missing_packages, serve_watched
from seer.config import RunConfig
from seer.metrics.events import both, discard
from seer.runs.manifest import recorded_limits
from seer.runs.run_folder import RunFolder, machine

if TYPE_CHECKING:
    from seer.api import Rollout
    from seer.cli.failures import Failures
    from seer.environments.base import Environment
    from seer.runs.identity import RunIdentity
    from seer.runs.prompts import EncodedPrompt
    from seer.runs.results import ResultsFile
    from seer.types import Restored

EXIT_FAILED = 1
OF_THE_PART = ("summary", "lost_instances")
"""What run.json says of the last part of a run that generated something."""

EXAMPLES = """\
examples:
  seer rollout --prompts examples/prompts/mixed.jsonl --n 8 --max-tokens 256
  seer rollout --model org/name --prompts p.jsonl --instances 2 --scheduler verl --out results.jsonl
  seer rollout --preset one-gpu --model DIR --prompts p.jsonl
  seer rollout --preset one-gpu --prompts p.jsonl --dry-run > run.toml    look at everything, start nothing
  seer rollout --config run.toml --max-tokens 512                         options override the file
  seer rollout --prompts p.jsonl --environment tools:calculator           the async function calculator of tools.py
  seer rollout --resume runs/20260101-120000

a line of FILE.jsonl:
  {"prompt": "text"} | {"messages": [{"role": "user", "content": "..."}]} | {"prompt_token_ids": [1, 2]}
  and optionally id, n, seed, max_tokens, temperature, ...

exit codes:
  0    every response ended by itself
  1    a response failed, --verify found a difference, or the run failed
  2    wrong arguments or files; nothing was started
  130  interrupted with Ctrl-C; 143 by SIGTERM, 129 by SIGHUP
"""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "rollout",
        help="generate responses to prompts on real instances",
        description="Generate n responses to each prompt on N instances, with log-probabilities, and write them as\n"
        "JSON lines. Without options: SmolLM2 on two CPU instances.",
        epilog=EXAMPLES,
    )
    add_config_options(parser)
    add_prompt_options(parser)
    add_rollout_options(parser)
    add_key(parser, "--scheduler", "rollout.scheduler", metavar="NAME", help="scheduler of the requests")
    add_key(parser, "--out", "out", type=Path, metavar="FILE.jsonl", help="results (results.jsonl in the run's folder)")
    verify = "score this share of the responses again during the run (none)"
    add_key(parser, "--verify", "verify", type=float, metavar="P", help=verify)
    environment = (
        "what responses talk to after each turn, as MODULE:NAME or FILE.py:NAME; a resumed run repeats it (nothing)"
    )
    add_key(parser, "--environment", "environment", metavar="MODULE:NAME", help=environment)
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="continue the run in this folder with its own prompts and configuration; other options may say where "
        "(--instances, --ray, ...) but not what it generates",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an earlier run in --run-dir, and a file that is at --out"
    )
    parser.add_argument("--json", action="store_true", help="print the summary, or the dry run, as JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_watch_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the verb out."""
    refuse_missing_packages(args)
    config = read_run(args) if args.resume is None else read_resumed(args.resume, args)
    return carry_out(config, args, lambda folder, located: _run_in(folder, located, args))


def _run_in(folder: RunFolder, config: RunConfig, args: argparse.Namespace) -> int:
    """Run in a folder that no other driver writes to."""
    from seer.api import Rollout
    from seer.cli.prompt_file import load_prompts
    from seer.environments.named import load_environment
    from seer.runs.identity import turns_identity
    from seer.runs.left_over import are_results_whole, is_nothing_left
    from seer.runs.results import ResultsFile

    environment = load_environment(config.environment) if config.environment is not None else None
    rollout = Rollout(config.rollout)
    prompts = load_prompts(config, rollout.engine)
    turns = turns_identity(None, None) if environment is not None else None
    identity = rollout.identity(prompts, seed=config.seed, turns=turns)
    out = config.out or folder.results
    is_new = args.resume is None
    past = _refuse_loss(folder, out, config, identity, is_new=is_new, force=args.force)
    is_over = not is_new and is_nothing_left(prompts, past)
    if is_over and not _is_asked_again(args) and folder.events.exists() and are_results_whole(out, prompts):
        ended = folder.read_manifest()
        if ended.get("status") == "finished":
            sys.stderr.write("the run had finished: nothing is left of it\n")
            _print_outcome(config, folder, out, ended, as_json=args.json)
            return _code_of(ended)
    with ResultsFile(out, replace=args.force or not is_new) as results:
        if is_new:
            _begin_anew(folder, config, identity)
        elif not is_over:
            folder.keep_events()
        if not is_over:
            folder.write_manifest({"command": "rollout", **recorded(config), "machine": machine(), "status": "running"})
        with status_of_failure(folder):
            signal, failures = asyncio.run(
                _roll_out(
                    rollout, prompts, config, folder, results, environment=environment, is_over=is_over, args=args
                )
            )
    outcome = _outcome(rollout, failures, is_cut=signal is not None)
    if is_over:
        outcome = {key: value for key, value in outcome.items() if key not in OF_THE_PART}
    ended = folder.read_manifest() | outcome
    folder.write_manifest(ended)
    _print_outcome(config, folder, out, ended, as_json=args.json)
    failures.report(hint=f"{resume_command(folder, out, config.environment)} tries them again")
    return exit_code(signal) if signal is not None else _code_of(ended)


def _is_asked_again(args: argparse.Namespace) -> bool:
    """Whether a run that had finished is to do something all the same."""
    return args.force or getattr(args, f"{CONFIG_PREFIX}verify", None) is not None


def _code_of(ended: dict[str, Any]) -> int:
    """The exit code of a run with such a manifest."""
    verification = ended.get("verification")
    is_clean = verification is None or verification["is_clean"]
    return EXIT_FAILED if ended.get("num_failed") or not is_clean else 0


def _begin_anew(folder: RunFolder, config: RunConfig, identity: RunIdentity) -> None:
    """Make the folder that of a new run, without a manifest.

    The old manifest goes first, and the caller writes the new one last: a folder with a manifest can be resumed,
    however early the run was killed, and one without can be started again.
    """
    from seer.runs.journal import Journal

    folder.manifest.unlink(missing_ok=True)
    for path in folder.earlier_events:
        path.unlink()
    folder.create(config.prompts)
    Journal.create(folder.journal, identity).close()


def _refuse_loss(
    folder: RunFolder, out: Path, config: RunConfig, identity: RunIdentity, *, is_new: bool, force: bool
) -> dict[tuple[int, int], Restored]:
    """Refuse what would lose an earlier run, other results or the prompts; nothing has been written yet.

    Returns what the run has generated before.
    """
    from seer.runs.journal import Journal
    from seer.runs.overwriting import (
        refuse_earlier_run,
        refuse_existing_out,
        refuse_impossible_out,
        refuse_unknown_results,
    )

    refuse_impossible_out(out, folder, config.prompts)
    if is_new:
        if not force:
            refuse_earlier_run(folder, config.prompts)
            refuse_existing_out(out)
        return {}
    with contextlib.closing(Journal.resume(folder.journal, identity)) as journal:
        past = journal.restored()
    if not force:
        refuse_unknown_results(out, past)
    return past


def _outcome(rollout: Rollout, failures: Failures, *, is_cut: bool) -> dict[str, Any]:
    """What the manifest says of a run that is over."""
    summary = rollout.summary
    outcome = {
        "status": "interrupted" if is_cut else "finished",
        "summary": _measured(asdict(summary), rollout.config.engine) if summary is not None else None,
        "num_responses": failures.num_responses,
        "num_failed": failures.num_failed,
        "lost_instances": rollout.fleet.num_lost,
    }
    verification = _verification_numbers(rollout)
    return outcome if verification is None else outcome | {"verification": verification}


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


async def _roll_out(
    rollout: Rollout,
    prompts: list[EncodedPrompt],
    config: RunConfig,
    folder: RunFolder,
    results: ResultsFile,
    *,
    environment: Environment | None,
    is_over: bool,
    args: argparse.Namespace,
) -> tuple[int | None, Failures]:
    """Write results as they come; returns the signal that cut the run short, if one did, and the failures."""
    from seer.cli.failures import Failures
    from seer.cli.progress import Progress
    from seer.metrics.jsonl import EventLog

    failures = Failures()
    progress = Progress(rollout, quiet=args.quiet)
    metadata = {"source": "rollout", **recorded(config)["options"]}
    has_events = is_over and folder.events.exists()  # of the parts in which something was generated
    events = contextlib.nullcontext(discard) if has_events else EventLog(folder.events, metadata)
    with events as log, signals_cancel(rollout) as interruption:
        progress.start()
        try:
            async with rollout:
                await serve_watched(rollout, args)
                if not is_over:
                    _describe_fleet(rollout, folder)
                groups = rollout.run(
                    prompts,
                    seed=config.seed,
                    events=both(log, progress.on_event),
                    journal=folder.journal,
                    resume=True,  # its first line is there, also of a new run
                    verify=config.verify or 0.0,
                    environment=environment,
                    environment_deadline_s=config.environment_deadline_s,
                )
                async for group in groups:
                    results.write(group.responses)
                    failures.count(group.responses)
        except asyncio.CancelledError:
            if not interruption.swallow():
                raise
        finally:
            await progress.stop()
    return interruption.number, failures


def _describe_fleet(rollout: Rollout, folder: RunFolder) -> None:
    manifest = folder.read_manifest() | recorded_limits(rollout.fleet.limits)
    manifest["nodes"] = [status.node for status in rollout.fleet.view()]
    manifest["model_dir"] = str(rollout.engine.model_dir)
    folder.write_manifest(manifest)


def _print_outcome(config: RunConfig, folder: RunFolder, out: Path, ended: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        _print_json(folder, out, ended)
    else:
        _print_summary(config, folder, out, ended)


def _print_json(folder: RunFolder, out: Path, outcome: dict[str, Any]) -> None:
    shown = {
        "status": outcome["status"],
        "results": str(out),
        "run": str(folder.path),
        "num_responses": outcome["num_responses"],
        "num_failed": outcome["num_failed"],
        "summary": outcome.get("summary"),
    }
    if "verification" in outcome:
        shown["verification"] = outcome["verification"]
    sys.stdout.write(json.dumps(shown) + "\n")


def _print_summary(config: RunConfig, folder: RunFolder, out: Path, outcome: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from seer.cli.summary_rows import summary_rows

    status, numbers, verification = outcome["status"], outcome.get("summary"), outcome.get("verification")
    rollout = config.rollout
    count = "1 instance" if rollout.instances == 1 else f"{rollout.instances} instances"
    table = Table("measure", "value", title=f"{rollout.scheduler} on {count}, {status}")
    for row in summary_rows(numbers or {}):
        table.add_row(*row)
    console = Console(soft_wrap=True)
    table.add_row("failed responses", f"{outcome['num_failed']:,} of {outcome['num_responses']:,}")
    if verification is not None:
        verdict = "clean" if verification["is_clean"] else "NOT CLEAN"
        table.add_row("verification", f"{verdict}, {verification['num_responses']:,} responses scored again")
    console.print(table)
    console.print(f"results  {out}\nrun      {folder.path}", highlight=False)
    if status == "interrupted":
        console.print(f"continue with: {resume_command(folder, out, config.environment)}", highlight=False)
