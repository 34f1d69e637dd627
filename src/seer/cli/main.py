# SPDX-License-Identifier: Apache-2.0
"""The `seer` command: finds the verbs, runs one, and turns errors into one line and an exit code.

A verb is a module of this package with `register(subparsers)`, which adds its parser and calls
`set_defaults(run=f)`; `f(args)` returns the exit code. Modules named `bench_*` register under `seer bench`.

Rules
  1. `seer --help` works wherever the core is installed: verbs import anything heavy inside `run`.
  2. Errors go to stderr as `error: ...` and, where there is advice, `hint: ...`; only results go to stdout.
  3. Exit codes: 0 done, 1 failed, 2 wrong or impossible arguments, 128 + N ended by signal N (130: Ctrl-C).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from seer.cli.signals import Interrupted, exit_code, signals_raise
from seer.cli.system_errors import explain
from seer.errors import ConfigError, InputError, MissingExtra, SeerError

VERBS = (
    "rollout",
    "serve",
    "top",
    "compare",
    "report",
    "verify",
    "simulate",
    "paper",
    "replay",
    "model",
    "profile",
    "drafts",
    "pool",
    "doctor",
)
BENCHES = ("bench_engine", "bench_pool")

EXIT_FAILED, EXIT_USAGE = 1, 2

EXAMPLES = """\
examples:
  seer model get smollm2                                    a small model to start with
  seer rollout --prompts examples/prompts/mixed.jsonl       responses from two CPU instances
  seer serve --model smollm2 --instances 2                  the same over HTTP, for RL frameworks
  seer compare --preset cpu-demo --prompts p.jsonl          schedulers on the same prompts and seeds
  seer simulate qwen2-vl-72b                                schedulers on a cluster, in virtual time
  seer doctor                                               what is installed and what is missing

`seer VERB --help` has the options and examples of a verb. --debug shows the traceback of an error.
"""


class Parser(argparse.ArgumentParser):
    """argparse whose examples keep their lines, and whose usage errors are two lines."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where the options are listed."""
        _complain(message, f"see `{self.prog} --help`")
        raise SystemExit(EXIT_USAGE)


class _PrintVersion(argparse.Action):
    """`--version`; the version is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        sys.stdout.write(f"seer {_version()}\n")
        raise SystemExit(0)


def _version() -> str:
    try:
        return importlib.metadata.version("seer-rollout")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="seer",
        description="Rollout for synchronous, on-policy RL of LLMs without the long tail.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error; also after the verb")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name in VERBS:
        _register(name, verbs)
    bench = verbs.add_parser("bench", help="measure one mechanism on this machine")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name in BENCHES:
        _register(name, benches)
    return parser


def _register(name: str, verbs: argparse._SubParsersAction[Parser]) -> None:
    importlib.import_module(f"seer.cli.{name}").register(verbs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Taken out by hand so that it also works behind the verb, where people add it after an error.
    debug = "--debug" in words
    parser = build_parser()
    args, unknown = parser.parse_known_args([word for word in words if word != "--debug"])
    if unknown:
        _complain(f"unknown argument {' '.join(unknown)}", f"see `seer {args.verb} --help`")
        return EXIT_USAGE
    try:
        with signals_raise():
            code = int(args.run(args))
            sys.stdout.flush()  # here, where an error has an exit code
            return code
    except (Exception, KeyboardInterrupt) as error:
        _drop_output()
        if debug and not isinstance(error, BrokenPipeError):
            raise
        return _report(error)


def _report(error: BaseException) -> int:
    """Write an error in one line, with a hint; returns the exit code."""
    if isinstance(error, BrokenPipeError):  # the reader of our output has gone (`seer ... | head`)
        return EXIT_FAILED
    if isinstance(error, KeyboardInterrupt):
        number = error.number if isinstance(error, Interrupted) else signal.SIGINT
        _complain(f"interrupted by {signal.Signals(number).name}")
        return exit_code(number)
    if isinstance(error, SeerError):
        _complain(str(error), error.hint)
        return EXIT_USAGE if isinstance(error, ConfigError | InputError | MissingExtra) else EXIT_FAILED
    explanation = explain(error)
    if explanation is not None:
        _complain(explanation.message, explanation.hint)
        return explanation.exit_code
    _complain(f"{type(error).__name__}: {error}", "this is a bug; --debug shows where it came from")
    return EXIT_FAILED


def _drop_output() -> None:
    """Write out what stdout can still take, and leave nothing that the interpreter would fail to write at its exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, hint: str | None = None) -> None:
    with contextlib.suppress(OSError):  # no terminal is left after SIGHUP
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
        if hint:
            sys.stderr.write(f"hint: {hint}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
