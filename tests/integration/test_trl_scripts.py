# SPDX-License-Identifier: Apache-2.0
"""The example and the benchmark's script run from end to end on a tiny model."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
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
    assert [line.split()[:1] for line in printed.splitlines()] == [["step"], ["1"], ["2"], [], ["seer"]]
    assert "vs verl-sync" in printed
    assert main(["report", f"{out}/seer"]) == 0


def test_the_benchmark_writes_a_line_per_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    script = load(monkeypatch, "benchmarks/grpo", "gpu", "--tiny", "--arm", "seer", "--steps", "3", "--out", out)
    script.main()
    lines = [json.loads(line) for line in (tmp_path / "out" / "seer.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["rollout_s"] > 0 and line["mean_gap"] < 1e-5 for line in lines)


def test_a_recorded_question_is_scored_by_the_answer_in_the_last_box(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load(monkeypatch, "benchmarks/verl", "recorded_questions")
    assert script.score(r"\boxed{3}, no: \boxed{ \frac{\sqrt{2}}{5} }", r"\frac{\sqrt{2}}{5}") == 1.0
    assert script.score(r"\boxed{3}", "4") == 0.1
    assert script.score(r"it is 4, \boxed{4", "4") == 0.0


@pytest.mark.timeout(600)  # the arm has 540 s, and ends by itself before
def test_the_benchmark_says_what_its_arms_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    script = load(monkeypatch, "benchmarks/grpo", "gpu", "--tiny", "--arms", "seer", "--steps", "3", "--out", out)
    script.main()
    printed = capsys.readouterr().out
    wanted = ("trainer built", "instances start", "instances up in", "step 1:", "handed over in", "step 3:", "g over")
    found = [printed.find(one) for one in wanted]
    assert min(found) >= 0, printed
    assert found == sorted(found), printed
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["seer"]["status"] == {"status": 0, "weights": "in-place"}
    assert summary["seer"]["steps"] == 3
    assert (tmp_path / "out" / "seer-logs" / "instance-0.log").exists()


def test_an_arm_at_its_limit_leaves_the_stack_of_every_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = load(monkeypatch, "benchmarks/grpo", "gpu", "--tiny", "--arms", "seer", "--out", str(tmp_path))
    inner = "import time\ndef waits_below():\n print('below', flush=True)\n time.sleep(1000)\nwaits_below()"
    outer = (
        f"import subprocess, sys\ndef waits_above():\n subprocess.run([sys.executable, '-c', {inner!r}])\nwaits_above()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", outer],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    ) as arm:
        assert arm.stdout is not None
        assert arm.stdout.readline() == b"below\n"
        script.end_all(arm)
        log = arm.stdout.read().decode()  # until the last of them has ended
    assert arm.returncode == -signal.SIGABRT
    assert "in waits_above" in log
    assert "in waits_below" in log


def test_the_news_of_an_arm_are_its_marked_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = load(monkeypatch, "benchmarks/grpo", "gpu", "--tiny", "--arms", "seer", "--out", str(tmp_path))
    log = tmp_path / "seer.log"
    log.write_text("-- begun\nloading\n-- half a li")
    with log.open("rb") as read:
        assert list(script.news(read)) == ["begun"]
        assert script.newest_line(script.read_arguments(), "seer") == "seer.log: loading"
        log.write_text("-- begun\nloading\n-- half a line\n")
        assert list(script.news(read)) == ["half a line"]


def test_the_word_problems_know_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load(monkeypatch, "benchmarks/grpo", "word_problems")
    rows = script.problems(200, seed=1)
    assert len({row["prompt"][0]["content"] for row in rows}) == 200
    assert rows == script.problems(200, seed=1)
    assert script.score("so #### 1,234", 1234) == 1.0
    assert script.score("#### 5, no, #### 6", 5) == 0.1
    assert script.score("it is 7", 7) == 0.0
    assert all(isinstance(row["answer"], int) and row["answer"] >= 0 for row in rows)
