# SPDX-License-Identifier: Apache-2.0
"""Environments and schemas by name: of files here; names of modules are in tests/integration/test_verify_turns.py."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from seer.environments.named import load_environment, load_tools, with_whole_path
from seer.errors import ConfigError

CODE = """
from helpers_beside import ANSWER

async def tool(conversation):
    return ANSWER

def plain(conversation):
    return ANSWER

SCHEMA = {"type": "function"}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helpers_beside.py").write_text("ANSWER = None\n")
    (tmp_path / "my tools.py").write_text(CODE)
    return str(tmp_path / "my tools.py")


def test_a_file_may_import_what_stands_beside_it_and_is_loaded_once(file: str) -> None:
    environment: Any = load_environment(f"{file}:tool")
    assert load_environment(f"{file}:tool") is environment
    assert environment.__globals__["ANSWER"] is None


def test_a_relative_file_is_found_from_another_folder(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = with_whole_path("my tools.py:tool")
    assert name == f"{file}:tool"
    assert with_whole_path("tools:calculator") == "tools:calculator"
    monkeypatch.chdir("/")
    load_environment(name)


def test_one_schema_is_a_list_of_one(file: str) -> None:
    assert load_tools(f"{file}:SCHEMA", "--tools") == [{"type": "function"}]
    with pytest.raises(ConfigError, match="are a function, not schemas"):
        load_tools(f"{file}:plain", "--tools")


@pytest.mark.parametrize(("name", "why"), [("nothing.py:tool", "No such file"), ("nothing.py", "names no object")])
def test_what_is_not_there_is_refused_with_an_example(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        load_environment(name, "--set environment=")
    assert "--set environment=MODULE:NAME or FILE.py:NAME" in str(caught.value.hint)


BAD_FILES = {
    "raises": (b"raise ValueError('no key')", "ValueError: no key"),
    "is no Python": (b"def f(:", "SyntaxError: invalid syntax"),
    "is no text": (b"\x00\xff", "SyntaxError: "),
    "ends the process": (b"import sys\nsys.exit(0)", "SystemExit: 0"),
    "never returns": (b"def tool(): tool()\ntool()", "RecursionError: "),
    "refuses names": (b"def __getattr__(name): raise KeyError(name)", "KeyError: 'tool'"),
    "cannot be made": (b"class tool:\n    def __init__(self): raise ValueError('no key')", "ValueError: no key"),
    "raises what is no error": (b"raise BaseException('no key')", "BaseException: no key"),
    "is cancelled when made": (
        b"import asyncio\nclass tool:\n    def __init__(self): raise asyncio.CancelledError('no key')",
        "CancelledError: no key",
    ),
    "answers for no name": (
        b"class Tool:\n    def __getattr__(self, name): raise OSError(name)\n"
        b"    def __call__(self, one): ...\ntool = Tool()",
        "fails when it is looked at: OSError",
    ),
    "ends when made": (b"class tool:\n    def __init__(self): raise SystemExit(0)", "SystemExit: 0"),
    "takes two": (b"async def tool(one, two): ...", "missing a required argument: 'two'"),
    "takes none": (b"async def tool(): ...", "too many positional arguments"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_whatever_the_code_of_a_user_does_is_one_error(kind: str, tmp_path: Path) -> None:
    content, why = BAD_FILES[kind]
    (tmp_path / "bad.py").write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(why)):
        load_environment(f"{tmp_path / 'bad.py'}:tool")


@pytest.mark.parametrize("name", [".:tool", ".tools:tool", "tools\0.py:tool", "tools\0:tool", "x" * 5000 + ".py:tool"])
def test_names_that_no_module_can_have_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_environment(name)


def test_a_file_that_would_be_read_for_ever_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "zeros.py").symlink_to("/dev/zero")
    for name in ("pipe.py", "zeros.py"):
        with pytest.raises(ConfigError, match="is not a regular file"):
            load_environment(f"{tmp_path / name}:tool")


def test_a_link_to_a_file_of_another_ending_is_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools-2").write_text("async def tool(conversation): ...\n")
    (tmp_path / "tools.py").symlink_to("tools-2")
    monkeypatch.chdir(tmp_path)
    assert callable(load_environment(with_whole_path("tools.py:tool")))


def test_a_name_that_a_file_lacks_and_a_plain_function_are_refused(file: str) -> None:
    with pytest.raises(ConfigError, match="no attribute 'other'"):
        load_environment(f"{file}:other")
    with pytest.raises(ConfigError, match="not an async function"):
        load_environment(f"{file}:plain")
