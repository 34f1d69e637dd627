# SPDX-License-Identifier: Apache-2.0
"""The example and the benchmark's script run from end to end on a tiny model."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("trl")
pytest.importorskip("reasoning_gym")

import trl_toy  # noqa: F401 - its imports are quiet
from seer.cli.main import main

ROOT = Path(__file__).parents[2]


def load(monkeypatch: pytest.MonkeyPatch, folder: str, name: str, *arguments: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / folder))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what reasoning-gym's imports say
        return importlib.import_module(name)


def test_the_example_prints_its_steps_and_can_be_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    script = load(monkeypatch, "examples/grpo_trl", "train", "--tiny", "--steps", "2", "--output-dir", out)
    script.main()
    printed = capsys.readouterr().out
    assert "vs verl-sync" in printed
    assert [line.split()[0] for line in printed.splitlines() if line[:4].strip().isdigit()] == ["1", "2"]
    assert main(["report", f"{out}/seer"]) == 0


def test_the_benchmark_writes_a_line_per_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    script = load(monkeypatch, "benchmarks/grpo", "gpu", "--tiny", "--arm", "seer", "--steps", "3", "--out", out)
    script.main()
    lines = [json.loads(line) for line in (tmp_path / "out" / "seer.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["rollout_s"] > 0 and line["mean_gap"] < 1e-5 for line in lines)


def test_the_word_problems_know_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load(monkeypatch, "benchmarks/grpo", "word_problems")
    rows = script.problems(200, seed=1)
    assert len({row["prompt"][0]["content"] for row in rows}) == 200
    assert rows == script.problems(200, seed=1)
    assert script.score("so #### 1,234", 1234) == 1.0
    assert script.score("#### 5, no, #### 6", 5) == 0.1
    assert script.score("it is 7", 7) == 0.0
    assert all(isinstance(row["answer"], int) and row["answer"] >= 0 for row in rows)
