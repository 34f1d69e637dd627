# SPDX-License-Identifier: Apache-2.0
"""The example with a tool trains in TRL: responses have turns, tools are called, and the report shows both."""

from __future__ import annotations

import importlib
import platform
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("trl")

import trl_toy  # noqa: F401 - its imports are quiet
from seer.cli.main import main

ROOT = Path(__file__).parents[2]
FOLDER = "examples/tools_trl"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the sandbox is of Linux on x86-64"
)


def load(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / FOLDER))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    sys.modules.pop(name, None)  # another example may have a module of this name
    return importlib.import_module(name)


def test_the_example_trains_with_turns_and_can_be_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    script = load(monkeypatch, "train_with_tool", "--tiny", "--steps", "4", "--output-dir", out)
    steps = script.main()
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:1] for line in printed] == [["step"], ["1"], ["2"], ["3"], ["4"], [], ["seer"]]
    assert max(step["seer/turns_mean"] for step in steps) > 1.0, "no tool was ever called"
    assert all(step["seer/tool_failures"] == 0 for step in steps)
    assert all(step["seer/on_policy/mean_gap"] < 1e-5 for step in steps)
    assert main(["report", f"{out}/seer"]) == 0
    page = next(tmp_path.rglob("report.html")).read_text()
    assert "turns that waited for tools" in page
    assert re.search(r"waits for its tool after turn 1", page)


def test_the_word_problems_know_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    calculator = load(monkeypatch, "calculator")
    rows = calculator.word_problems(50, seed=1)
    assert rows == calculator.word_problems(50, seed=1)
    assert len({row["prompt"][0]["content"] for row in rows}) == 50
    for row in rows:
        have, bags, each, lost = map(int, re.findall(r"\d+", row["prompt"][0]["content"])[:4])
        assert row["answer"] == have + bags * each - lost
