# SPDX-License-Identifier: Apache-2.0
"""Bad inputs as commands: generated over the types of the configuration, of the options and of the files.

Every case must end with exit code 2 and one line that says what is wrong, before anything starts. Commands are run in
this process: `main` gets the words and its output is caught.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import tomli_w

from bad_values import bad_values
from seer.cli import main as cli
from seer.cli.gpus_option import gpus_option
from seer.cli.number_option import NumberOption
from seer.cli.reference import verbs_of
from seer.cli.rollout_options import CONFIG_PREFIX
from seer.cli.size_option import size_option
from seer.cli.url_option import url_option
from seer.config import RunConfig
from seer.config.engines import ENGINE_CONFIGS
from seer.ranges import TokenId, base_type

_PARSER = cli.build_parser()
DRY_RUN = ("rollout", "--engine", "fake", "--dry-run")
SIZES = ("-1", "many", "nan", "inf", "1e400", "9" * 400, "99999999999TiB", "1 GiB and more", "1.5.5GiB")
LISTS = ("many", "-1", "1,,2", "nan", str(1 << 64), "1e400", "1.5")
BAD_URLS = (
    "", "nonsense", "127.0.0.1:8000", "http://", "http://:80", "ftp://x", "file:///etc/passwd", "http://[::1",
    "http://127.0.0.1:65536", "http://127.0.0.1:0", "http://127.0.0.1:-1", "http://127.0.0.1:nan", "http://a b",
    "http://a\x01", "http://127.0.0.1:1/\r\nX: y", "http://me:key@127.0.0.1", "http://" + "a" * 300,
    "http://a/" + "b" * 5000,
)  # fmt: skip
OPTION_LISTS = {"--batches", "--tokens", "--contexts", "--references", "--paths", "--seeds"}


@dataclass(frozen=True)
class BadCommand:
    """Words after `seer`, and the files that they name."""

    name: str
    words: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    mentions: str = ""
    """What the message must name: the key, the option (two names separated by |) or the file. So no case passes by
    another mistake in it."""
    is_ranged: bool = False
    """About an option with a kind of `seer.ranges`."""
    stops_at_options: bool = False
    """The option itself is refused: the verb must not even begin."""


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    exit_code: int
    stdout: str
    stderr: str

    def problem(self, mentions: str) -> str | None:
        """Why this is not a clean refusal that names the input; None if it is one."""
        lines = [line for line in self.stderr.splitlines() if not re.match(r"p\.jsonl, line \d+: ", line)]
        if self.exit_code != 2:
            return f"exit code {self.exit_code}: {self.stderr[-300:]}"
        if "bug" in self.stderr or "Traceback" in self.stderr or self.stdout:
            return f"it is called a bug, or something was printed: {self.stderr[-300:]}{self.stdout[:100]}"
        if not any(name in self.stderr for name in mentions.split("|")):
            return f"{mentions} is not named: {self.stderr[-300:]}"
        kinds = [line.partition(":")[0] for line in lines]
        return None if kinds in (["error"], ["error", "hint"]) else f"not one line: {self.stderr[-300:]}"


def run(case: BadCommand, folder: Path) -> Outcome:
    """Run a case in this folder, which is the current one."""
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = _main(case)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
    return Outcome(code, out.getvalue(), err.getvalue())


def _main(case: BadCommand) -> int:
    if case.stops_at_options:
        _PARSER.parse_args(case.words)
        return 0  # accepted
    with mock.patch.object(cli, "build_parser", return_value=_PARSER):  # made once: it takes longer than most cases
        return cli.main(case.words)


def config_cases() -> Iterator[BadCommand]:
    """Every field of the configuration, in a TOML file."""
    for engine in ENGINE_CONFIGS:
        for key, kind in _leaves(RunConfig, "", engine):
            if engine != "fake" and ".engine_settings" not in key:
                continue
            for number, value in enumerate(bad_values(kind)):
                content = _nested(key, value, {"rollout": {"engine": engine}})
                with contextlib.suppress(ValueError):  # TOML cannot write every value
                    yield BadCommand(
                        f"config-{engine}-{key}-{number}",
                        ("rollout", "--dry-run", "--config", "run.toml"),
                        {"run.toml": tomli_w.dumps(content).encode()},
                        mentions=f"{key}|{'unknown ' + '|unknown '.join(key.split('.'))}|{key.rpartition('.')[2]}=",
                    )


def option_cases() -> Iterator[BadCommand]:
    """Every number, size and list of numbers on the command line."""
    parsers = dict(verbs_of(_PARSER))
    rollout_flags = {flag for action in parsers["seer rollout"]._actions for flag in action.option_strings}
    for name, parser in parsers.items():
        words = tuple(name.split()[1:])
        required = tuple("x" for action in parser._actions if not action.option_strings and action.nargs is None)
        for action in parser._actions:
            if not action.option_strings:
                continue
            flag = action.option_strings[0]
            for number, text in enumerate(_bad_texts(action, flag)):
                if words == ("compare",) and flag in rollout_flags:
                    continue  # the same options, added by the same function
                is_key = action.dest.startswith(CONFIG_PREFIX)
                extra = ("--engine", "fake", "--dry-run") if is_key else required
                yield BadCommand(
                    f"option-{'-'.join(words)}{flag}-{number}",
                    (*words, *extra, f"{flag}={text}"),
                    mentions=_named(action, flag),
                    is_ranged=isinstance(action.type, NumberOption),
                    stops_at_options=not is_key and flag not in OPTION_LISTS,
                )


def _named(action: argparse.Action, flag: str) -> str:
    """A number out of range is refused by its key of the configuration, a text that is no number by its flag."""
    return f"{flag}|{action.dest.removeprefix(CONFIG_PREFIX)}" if action.dest.startswith(CONFIG_PREFIX) else flag


def prompt_cases() -> Iterator[BadCommand]:
    """Every field of a line of a prompts file."""
    from seer.runs.prompt_lines import _OWN, _SAMPLING

    kinds: dict[str, Any] = {**_OWN, **_SAMPLING, "prompt_token_ids": list[TokenId]}
    for key, kind in kinds.items():
        for number, value in enumerate(bad_values(kind)):
            fields: dict[str, Any] = {"prompt_token_ids": [1]} | {key: value}
            yield _prompts(f"prompt-{key}-{number}", json.dumps(fields).encode())
    for name, line in _BAD_LINES.items():
        yield _prompts(f"prompt-{name}", line)


_BAD_LINES = {
    "not-json": b"{",
    "not-utf-8": b'{"prompt": "\xff"}',
    "half-a-character": b'{"prompt": "\\ud800"}',
    "nested": b"[" * 100_000,
    "a-list": b"[1]",
    "a-number": b"5",
    "unknown-key": b'{"promt": "a"}',
    "two-kinds": b'{"prompt": "a", "prompt_token_ids": [1]}',
    "empty": b'{"prompt": ""}',
    "no-messages": b'{"messages": []}',
    "role": b'{"messages": [{"role": "robot", "content": "a"}]}',
    "content": b'{"messages": [{"role": "user", "content": [1]}]}',
    "min-above-max": b'{"prompt_token_ids": [1], "min_tokens": 9, "max_tokens": 3}',
    "too-long": b'{"prompt_token_ids": [1], "max_tokens": 2000000000}',
    "token-beyond-64-bits": b'{"prompt_token_ids": [99999999999999999999]}',
    "nothing": b"",
}


def _prompts(name: str, content: bytes) -> BadCommand:
    return BadCommand(name, (*DRY_RUN, "--prompts", "p.jsonl"), {"p.jsonl": content}, mentions="p.jsonl")


def set_cases() -> Iterator[BadCommand]:
    """Words of --set that are no settings."""
    for number, word in enumerate(_BAD_SETS):
        yield BadCommand(f"set-{number}", (*DRY_RUN, "--set", word), mentions="--set|gpus=")


_BAD_SETS = (
    "rollout.instances=nan", "rollout.instances=1e400", "rollout.instances", "=5", "n=", "n.x=5", "nosuch=1",
    "rollout.nosuch=1", "n=[[[[", "n=" + "9" * 5000, "rollout=5", "rollout.kv.blocks=-1", "sampling.temperature=inf",
    "n=" + "[" * 100_000, "out=\"a\\u0000b\"", "rollout.kv.memory_bytes=\"99999999999TiB\"",
    "n=16\n[rollout]\nx=1", "rollout.gpus=\"0-99999999999\"", "rollout.gpus=[4096]",
)  # fmt: skip


def name_cases() -> Iterator[BadCommand]:
    """Names that would be other places, and addresses that are none."""
    for number, name in enumerate(("../up", "a/b", "", "x" * 65, "a b", "a\0b", "/etc/passwd", "a\nb")):
        yield BadCommand(f"pool-up-name-{number}", ("pool", "up", "--dram=1GiB", f"--name={name}"), mentions="name")
        yield BadCommand(f"pool-down-name-{number}", ("pool", "down", f"--name={name}"), mentions="name")
        yield BadCommand(f"pool-name-{number}", (*DRY_RUN, f"--pool-name={name}"), mentions="name")
    for number, url in enumerate(BAD_URLS):
        yield BadCommand(f"top-{number}", ("top", "--once", url), mentions="argument url", stops_at_options=True)


def _bad_texts(action: argparse.Action, flag: str) -> Iterator[str]:
    if flag in OPTION_LISTS:
        yield from LISTS
    elif action.type is size_option:
        yield from SIZES
    elif isinstance(action.type, NumberOption):
        yield from _texts(action.type.kind)
    elif action.type is url_option:
        yield from BAD_URLS
    elif action.type is gpus_option:
        yield from ("", "many", "-1", "0,0", "3-1", "4096", "0-99999999999", "0-" + "9" * 5000, "1.5", "\u0663")
    elif action.type in (int, float) and action.dest.startswith(CONFIG_PREFIX):
        yield from _texts(_kind_of(action.dest.removeprefix(CONFIG_PREFIX)))
    elif action.type in (int, float):
        raise AssertionError(f"{flag} has no range: use NumberOption")
    elif action.choices is not None:
        yield "nonsense"


def _texts(kind: Any) -> Iterator[str]:
    """Numbers as people type them, and words that are none."""
    for value in bad_values(kind):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield str(value) if value != 10**400 else "9" * 400
    yield from ("many", "", "0x10", "1e400", "१०१०१०१०१०१०१०१०१०१०")
    if base_type(kind) is int:
        yield "1.0"


def _kind_of(key: str) -> Any:
    owner: Any = RunConfig
    for name in key.split("."):
        owner = typing.get_type_hints(owner, include_extras=True)[name]
    return owner


def _leaves(owner: Any, where: str, engine: str) -> Iterator[tuple[str, Any]]:
    """Every setting below a section by its key, and the sections themselves."""
    hints = typing.get_type_hints(owner, include_extras=True)
    for one in dataclasses.fields(owner):
        key, kind = f"{where}{one.name}", hints[one.name]
        section = ENGINE_CONFIGS[engine] if one.name == "engine_settings" else _section(kind)
        yield key, dict[str, Any] if section is not None else kind
        if section is not None:
            yield from _leaves(section, f"{key}.", engine)


def _section(kind: Any) -> Any:
    options = typing.get_args(kind) or (kind,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def _nested(key: str, value: Any, content: dict[str, Any]) -> dict[str, Any]:
    *sections, name = key.split(".")
    inner = content
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value
    return content


def json_values(kind: Any) -> Iterator[Any]:
    """Bad values of a kind as JSON files can hold them."""
    yield from (value for value in bad_values(kind) if not (isinstance(value, float) and math.isinf(value)))
