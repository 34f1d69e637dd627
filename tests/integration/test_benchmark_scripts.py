# SPDX-License-Identifier: Apache-2.0
"""Every benchmark starts from a checkout alone, and says what its numbers were measured with."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from seer.drafting.recording import read_groups

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RECORDINGS = BENCHMARKS / "recordings"
STARTED_BY_OTHERS = ("served.py", "lmcache_peer.py", "farm.py")  # by vllm/gpu.py, pool/run.py and scale/run.py
STAMPED = ("date", "commit", "is_dirty", "command", "config", "hardware", "versions")
SCRIPTS = sorted(
    path for path in BENCHMARKS.glob("*/*.py") if "__main__" in path.read_text() and path.name not in STARTED_BY_OTHERS
)

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script as `python SCRIPT ARGUMENTS` does, and returns what it printed."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    before = set(sys.modules)

    def run_script(script: Path, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        sys.path.insert(0, str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        finally:
            # Two folders may have a module of the same name.
            for name in set(sys.modules) - before:
                if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
                    del sys.modules[name]
        return capsys.readouterr().out

    return run_script


def head_commit() -> str | None:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def assert_stamp(stamp: dict[str, Any], script: str) -> None:
    assert all(key in stamp for key in STAMPED)
    assert stamp["commit"] == head_commit()
    assert stamp["command"].startswith(f"python benchmarks/{script}")
    assert stamp["hardware"]["cores"] >= 1
    assert stamp["versions"]["numpy"] == np.__version__


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_a_script_imports_and_explains_itself(script: Path, run: Run) -> None:
    assert run(script, "--help").startswith("usage:")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_a_script_that_measures_takes_a_stamp(script: Path) -> None:
    makes_files_only = script.name in ("pack.py", "pack_suffix.py", "small_shape.py", "trim.py")
    assert makes_files_only or "_stamp(args" in script.read_text()


def test_the_head_of_printed_results_names_commit_command_config_and_machine(run: Run) -> None:
    script = BENCHMARKS / "scheduling" / "run.py"
    printed = run(script, "decisions", "--exponent", "3", "--repeats", "1", "--schedulers", "divided")
    first, config, hardware, versions = printed.splitlines()[:4]
    assert f"commit {head_commit() or 'unknown'}" in first
    assert first.endswith("python benchmarks/scheduling/run.py decisions --exponent 3 --repeats 1 --schedulers divided")
    assert config == "Config: schedulers=divided exponent=3 repeats=1 run=decisions"
    assert re.fullmatch(r"Hardware: .+, \d+ cores, \d+ GiB, .+; Linux .+", hardware)
    assert f"numpy {np.__version__}" in versions


@pytest.mark.parametrize("script", ["engine/host.py", "engine/budget.py"])
def test_the_first_line_of_json_lines_is_the_stamp(script: str, run: Run) -> None:
    lines = [json.loads(line) for line in run(BENCHMARKS / script, "--batches", "1").splitlines()]
    assert_stamp(lines[0]["stamp"], script)
    assert lines[0]["stamp"]["config"]["trace"] == "benchmarks/recordings/qwen1.5b-mix-n16.npz"
    assert len(lines) > 1


def test_tokens_of_an_earlier_epoch_are_measured_on_the_recordings_of_the_repository(run: Run) -> None:
    game24 = str(RECORDINGS / "drafts_game24.npz")
    printed = run(BENCHMARKS / "grpo" / "context.py", "tokens", "--recording", game24)
    assert "recording=['benchmarks/recordings/drafts_game24.npz']" in printed
    assert "drafts_game24.npz: 100 groups" in printed


def test_a_ledger_of_rollouts_starts_with_the_stamp(tmp_path: Path) -> None:
    names = runpy.run_path(str(BENCHMARKS / "rollout" / "measure.py"), run_name="measure")
    names["Ledger"](tmp_path / "cpu.json", 1.0, {"commit": "c"})
    assert json.loads((tmp_path / "cpu.json").read_text())["stamp"] == {"commit": "c"}


def test_a_stamp_without_a_checkout_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = runpy.run_path(str(BENCHMARKS / "stamp.py"), run_name="stamp")
    monkeypatch.setitem(names["_run"].__globals__, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert names["_commit"]() == {"commit": None, "is_dirty": None}


def test_every_recording_is_readable_and_has_its_source_and_licence_in_the_readme() -> None:
    rows = {
        cells[1].strip().strip("`"): cells
        for line in (RECORDINGS / "README.md").read_text().splitlines()
        if (cells := line.split("|"))[1:] and cells[1].strip().endswith(".npz`")
    }
    files = sorted(RECORDINGS.glob("*.npz"))
    assert sorted(rows) == [path.name for path in files]
    assert sum(path.stat().st_size for path in files) < 4 << 20
    for path in files:
        assert zipfile.is_zipfile(path), "not a pointer to a file that is stored elsewhere"
        assert f" {len(read_groups(path))} " in rows[path.name][2]
        assert all(cell.strip() for cell in rows[path.name][1:-1])


def test_no_benchmark_or_example_reads_a_path_outside_the_repository() -> None:
    here = rf"(?<![\w.-]){re.escape(str(ROOT.parent))}/\S*"  # a path of the machine that this checkout is on
    named = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for folder in ("benchmarks", "examples", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md")
        for found in re.finditer(rf"\.\./shared\S*|{here}|https?://download\.\S+", path.read_text())
    ]
    assert named == []


def test_what_make_bench_runs_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile[makefile.index("\nbench: setup") :].split("\n\n")[0]
    scripts = re.findall(r"(benchmarks/\S+\.py)", recipe)
    assert len(scripts) > 5
    assert [script for script in scripts if not (ROOT / script).exists()] == []
