# SPDX-License-Identifier: Apache-2.0
"""Settings, arguments, endpoints, metrics and variables that the pages name are in the code."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import seer
from markdown_pages import DOCS, ROOT, code_blocks, inline_code
from seer.config.build import build_run
from seer.config.keywords import InstanceKeywords, RolloutKeywords
from seer.environments.python_sandbox import SandboxLimits
from seer.environments.python_tool import PythonTool
from seer.environments.reasoning_tasks import ReasoningTasks
from seer.environments.text_games import TextGame
from seer.integrations.verl.settings import VerlSettings

PAGES = [page for page in DOCS if page.name not in ("CHANGELOG.md", "log.md")]  # which tell what was so once
CALLABLES: dict[str, tuple[Callable[..., Any], type | None]] = {
    "Rollout": (seer.Rollout, RolloutKeywords),
    "SyncRollout": (seer.SyncRollout, RolloutKeywords),
    "run": (seer.Rollout.run, None),
    "submit": (seer.Session.submit, None),
    "add_instances": (seer.Rollout.add_instances, InstanceKeywords),
    "Sampling": (seer.Sampling, None),
    "Prompt": (seer.Prompt, None),
    "Reply": (seer.Reply, None),
    "End": (seer.End, None),
    "PythonTool": (PythonTool, None),
    "SandboxLimits": (SandboxLimits, None),
    "TextGame": (TextGame, None),
    "ReasoningTasks": (ReasoningTasks, None),
}
"""By the name that is called; with the names of its `**settings`."""
NOT_THERE = {"/get_sequence_logprobs/", "/update_weights_from_distributed"}
"""Endpoints of others that serve.md says are missing."""


def sources() -> str:
    """All code, as text."""
    folders = ("src", "tests", "benchmarks", "examples")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".sh"))
    return "\n".join(file.read_text() for file in files if file != Path(__file__))


def calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """Name and keyword arguments of each call in some Python; nothing where the text is none."""
    try:
        tree = compile(text, "page", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield name, [keyword.arg for keyword in node.keywords if keyword.arg is not None]


def unknown(name: str, keywords: list[str]) -> set[str]:
    """Keyword arguments that a callable of ours does not take; those of other callables are not looked at."""
    if name not in CALLABLES:
        return set()
    called, more = CALLABLES[name]
    return set(keywords) - inspect.signature(called).parameters.keys() - set(more.__annotations__ if more else ())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_calls_have_only_arguments_that_exist(page: Path) -> None:
    texts = [block.text for block in code_blocks(page) if block.language == "python"] + inline_code(page)
    assert [(name, found) for text in texts for name, used in calls(text) if (found := unknown(name, used))] == []


def test_calls_are_found_and_a_wrong_argument_is_named() -> None:
    assert unknown(*next(calls("rollout.run(prompts, n=4, sampels=2)"))) == {"sampels"}
    assert unknown(*next(calls("Rollout(..., pool_bytes=..., kv_block=1)"))) == {"kv_block"}
    assert list(calls("no python (at all)")) == []
    seen = {name for page in PAGES for block in code_blocks(page) for name, _ in calls(block.text)}
    assert {"Rollout", "run", "Sampling", "PythonTool", "TextGame"} <= seen


def test_every_key_after_set_is_a_setting() -> None:
    named = {
        word for page in PAGES for typed in inline_code(page) for word in re.findall(r"--set ([a-z_.]+=\S+)", typed)
    }
    assert len(named) >= 2
    for word in named:
        key, _, value = word.partition("=")
        values: dict[str, Any] | str | float = float(value) if value.isdigit() else value
        for section in reversed(key.split(".")):
            values = {section: values}
        assert isinstance(values, dict)
        build_run(values, source=f"--set {word}")


def test_the_settings_of_verl_are_those_of_the_code_with_their_defaults() -> None:
    page = (ROOT / "docs" / "use-in-verl.md").read_text()
    table = page.partition("\n## Settings\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    shown = {name: given for cell in cells for name, given in re.findall(r"`([a-z_.*]+)`(?: \(([^)]*)\))?", cell)}
    fields = {field.name: field for field in dataclasses.fields(VerlSettings)}
    assert {name.partition(".")[0] for name in shown} - {"seer", "auto", "local"} == set(fields)
    numbers = {name: float(given) for name, given in shown.items() if given.isdigit()}
    assert len(numbers) >= 6
    assert numbers == {name: fields[name].default for name in numbers}
    in_text = {name.partition(".")[0] for name in re.findall(r"custom\.seer\.([a-z_]+)", page)}
    assert in_text - set(fields) == set()


def test_every_metric_that_a_page_names_is_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(seer:[a-z_]+)`", page.read_text())}
    counted = (ROOT / "src" / "seer" / "metrics" / "prometheus.py").read_text()
    assert len(named) >= 3
    stems = {name: name.removeprefix("seer:").removesuffix("_total") for name in sorted(named)}
    assert [name for name, stem in stems.items() if not re.search(rf'[":]{stem}"', counted)] == []


def test_every_variable_that_a_page_names_is_read() -> None:
    code = sources()
    named = {name for page in PAGES for name in re.findall(r"\bSEER_[A-Z_]+\b", page.read_text())}
    assert len(named) >= 3
    assert [name for name in sorted(named) if name not in code] == []


def test_every_endpoint_that_the_page_on_serving_names_is_there() -> None:
    pytest.importorskip("fastapi", reason="needs `pip install 'seer-rollout[serve]'`")
    from seer.serve.app import ADMIN, GENERATION, OPEN

    paths = {route.split(" ")[1] for route in (*OPEN, *GENERATION, *ADMIN)}
    typed = [word for text in inline_code(ROOT / "docs" / "serve.md") for word in text.split()]
    named = {word.partition("?")[0] for word in typed if re.fullmatch(r"/[a-z0-9_/]+(\?\S*)?", word)}
    assert len(named) > 30
    assert named - paths == NOT_THERE
