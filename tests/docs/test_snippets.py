# SPDX-License-Identifier: Apache-2.0
"""What the pages tell people to type is right: commands parse with the real parser, Python compiles.

Commands are only parsed: files and models they name need not exist.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from markdown_pages import DOCS, ROOT, Block, code_blocks, inline_code
from seer.cli.main import build_parser

SHELL = ("", "text", "sh", "bash", "shell", "console")
COMMAND = re.compile(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?seer (?P<arguments>.*)")
PAGES = [page for page in DOCS if page.name != "CHANGELOG.md"]  # which tells what was so once
BLOCKS = [block for page in PAGES for block in code_blocks(page)]


def commands(block: Block) -> Iterator[list[str]]:
    """The arguments of each `seer ...` line, without comment, column of explanations, pipe or redirection."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if match := COMMAND.fullmatch(line):
            typed = re.split(r"  +(?!-)", match["arguments"].strip())[0]
            lexer = shlex.shlex(typed, posix=True, punctuation_chars="|&;<>")
            lexer.whitespace_split = True
            arguments = list(lexer)
            end = next((at for at, word in enumerate(arguments) if set(word) <= set("|&;<>")), len(arguments))
            yield arguments[:end]


def parses(arguments: list[str]) -> bool:
    """Whether `seer` would accept the command line; `--help` is accepted."""
    try:
        _, unknown = build_parser().parse_known_args([word for word in arguments if word != "--debug"])
    except SystemExit as end:
        return end.code == 0
    return not unknown


COMMANDS = [
    pytest.param(arguments, id=f"{block.where}: {' '.join(arguments)}")
    for block in BLOCKS
    if block.language in SHELL
    for arguments in commands(block)
]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_every_command_line_parses(arguments: list[str]) -> None:
    assert parses(arguments), f"seer {' '.join(arguments)}"


def test_commands_are_found_and_bad_ones_refused() -> None:
    text = "$ seer doctor --json | head\nseer simulate synthetic    what it is for\nseer doctor --jsonn\nseer dokter\n"
    found = list(commands(Block(ROOT / "README.md", 1, "", text)))
    assert found == [["doctor", "--json"], ["simulate", "synthetic"], ["doctor", "--jsonn"], ["dokter"]]
    assert [parses(arguments) for arguments in found] == [True, True, False, False]
    assert len(COMMANDS) > 20, "the pages' commands are not found"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_within_sentences_name_verbs_and_options_that_exist(page: Path) -> None:
    helps = verb_helps()
    for typed in inline_code(page):
        words = typed.split()
        if len(words) < 2 or words[0] != "seer" or not re.fullmatch(r"[a-z][a-z-]*", words[1]):
            continue
        verb = " ".join(words[1:3]) if " ".join(words[1:3]) in helps else words[1]
        assert verb in helps, f"`{typed}`: no such verb"
        for option in re.findall(r"(?<!\S)--[a-z-]+", typed):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", helps[verb]), f"`{typed}`: no such option"


def verb_helps() -> dict[str, str]:
    """The help text of each verb, and of each verb of a verb (`pool up`)."""
    found: dict[str, str] = {}

    def visit(parser: object, name: str) -> None:
        for action in parser._actions:  # type: ignore[attr-defined]
            if isinstance(action.choices, dict):
                for word, child in action.choices.items():
                    found[f"{name} {word}".strip()] = child.format_help()
                    visit(child, f"{name} {word}".strip())

    visit(build_parser(), "")
    return found


def test_every_make_target_that_pages_and_workflows_name_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        word for page in PAGES for typed in inline_code(page) for word in re.findall(r"^make ([a-z][a-z-]*)", typed)
    }
    named |= {word for block in BLOCKS for word in re.findall(r"^\s*make ([a-z][a-z-]*)", block.text, re.MULTILINE)}
    for workflow in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for job in yaml.safe_load(workflow.read_text())["jobs"].values():
            steps = "\n".join(step.get("run", "") for step in job["steps"])
            named |= set(re.findall(r"^make ([a-z][a-z-]*)", steps, re.MULTILINE))
    assert {"demo", "test", "check", "sanitize", "coverage"} <= named
    assert named - targets == set()


PYTHON = [pytest.param(block, id=block.where) for block in BLOCKS if block.language == "python"]


@pytest.mark.parametrize("block", PYTHON)
def test_every_python_block_compiles(block: Block) -> None:
    compile(block.text, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
