# SPDX-License-Identifier: Apache-2.0
"""`seer compare`, `verify`, `replay` and `report` over one tiny model on the local engine."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from seer.analysis.comparison import order_of_runs
from seer.cli.main import main
from seer.engine.local.tiny import make_tiny_model
from seer.errors import InstanceError
from seer.hosting import ProcessInstance
from seer.runs.run_folder import RunFolder
from seer.types import Chunk

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two schedulers, made once."""
    home = tmp_path_factory.mktemp("compare")
    make_tiny_model(home / "tiny")
    lines = [json.dumps({"prompt_token_ids": [3 + i, 9, 4], "id": f"p{i}"}) for i in range(6)]
    (home / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    assert main([*compare(home, "c"), "--repeat", "2"]) == 0
    return home


def compare(home: Path, name: str) -> list[str]:
    where = ["--model", f"{home}/tiny", "--prompts", f"{home}/prompts.jsonl", "--run-dir", f"{home}/{name}"]
    sizes = ["--n", "4", "--max-tokens", "60", "--kv-memory", "8MiB", "--pool-memory", "8MiB"]
    return ["compare", "--schedulers", "verl,seer", *where, *sizes, "--no-pin", "--json", "--quiet"]


def test_each_repetition_starts_with_another_scheduler() -> None:
    assert order_of_runs(["a", "b"], 3) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_the_table_has_a_row_per_scheduler_and_tokens_are_identical(home: Path) -> None:
    manifest = json.loads((home / "c" / "run.json").read_text())
    rows = {row["scheduler"]: row for row in manifest["rows"]}
    assert list(rows) == ["verl", "seer"]
    assert rows["verl"]["speedup"] == 1.0
    for row in rows.values():
        assert row["repetitions"] == 2
        assert row["num_requests"] == 24
        assert row["different_responses"] == 0
        assert row["throughput_min"] <= row["throughput_tokens_s"] <= row["throughput_max"]
    assert [(run["scheduler"], run["repetition"]) for run in manifest["runs"]] == [
        ("verl", 0),
        ("seer", 0),
        ("seer", 1),
        ("verl", 1),
    ]


def test_every_run_of_it_is_a_run_that_can_be_verified_replayed_and_reported(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = home / "c" / "seer-0"
    assert main(["verify", str(run), "--share", "1", "--json"]) == 0
    verification = json.loads(capsys.readouterr().out)
    assert verification["is_clean"]
    assert verification["num_responses"] == 24
    assert main(["replay", str(run)]) == 0
    assert "oracle" in capsys.readouterr().out
    assert main(["report", str(run)]) == 0
    assert "clean" in (run / "report.html").read_text()


def test_forced_lengths_repeat_a_recorded_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*compare(home, "forced"), "--lengths", str(home / "c" / "verl-0")]) == 0
    rows = json.loads(capsys.readouterr().out)
    natural = json.loads((home / "c" / "run.json").read_text())["rows"]
    assert [row["num_tokens"] for row in rows] == [row["num_tokens"] for row in natural]
    assert [row["different_responses"] for row in rows] == [0, 0]
    assert main(["verify", str(home / "forced" / "seer-0"), "--share", "0.2"]) == 0
    assert main([*compare(home, "more"), "--n", "5", "--lengths", str(home / "c" / "verl-0")]) == 2
    assert "no finished response 4" in capsys.readouterr().err


def test_a_folder_that_another_run_writes_to_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder(home / "held").held():
        assert main(compare(home, "held")) == 2
        assert f"{home / 'held'} is in use" in capsys.readouterr().err
    assert not (home / "held").exists()


def test_an_earlier_comparison_is_replaced_only_by_force(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in (home / "c").rglob("*.jsonl")}
    assert main(compare(home, "c")) == 2
    assert "--force" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (home / "c").rglob("*.jsonl")} == before


@pytest.mark.parametrize("is_every", [True, False], ids=["all", "one"])
def test_failed_responses_make_the_exit_code_1(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_every: bool
) -> None:
    submit = ProcessInstance.submit

    def refuse(self: ProcessInstance, chunk: Chunk) -> None:
        if is_every or chunk.request == 0:
            raise InstanceError("no chunk is taken")
        submit(self, chunk)

    monkeypatch.setattr(ProcessInstance, "submit", refuse)
    assert main(compare(home, f"failed-{is_every}")) == 1
    printed = capsys.readouterr()
    assert "no chunk is taken" in printed.err
    if is_every:
        assert "error: every response failed under verl" in printed.err
    else:
        assert [row["num_failed"] for row in json.loads(printed.out)] == [1, 1]
        assert "error: 2 of 48 responses failed" in printed.err


@pytest.mark.skipif(CHROMIUM is None, reason="needs the system package chromium")
def test_the_page_is_drawn_by_a_real_browser(home: Path) -> None:
    assert CHROMIUM is not None
    page, picture = home / "c" / "report.html", home / "page.png"
    shown = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,2600"),
            *("--enable-logging=stderr", "--v=0", f"--user-data-dir={home}/chromium"),
            *(f"--screenshot={picture}", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert picture.stat().st_size > 50_000  # an empty page is a few kilobytes
    assert "CONSOLE" not in shown.stderr  # no complaint of the page itself
