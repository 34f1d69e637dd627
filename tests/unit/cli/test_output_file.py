# SPDX-License-Identifier: Apache-2.0
"""`--out` and `--json` lose no file: they are refused before the work begins, or written whole."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from seer.cli.main import main
from seer.metrics.events import Ended, Queued, Started, Stopped
from seer.metrics.jsonl import EventLog
from seer.runs.run_folder import RunFolder
from seer.speculation.step_profile import ProfilePoint, StepProfile

SIMULATION = ["simulate", "synthetic", "--groups", "2", "--group-size", "2", "--mean", "20", "--max", "40"]
SIMULATION += ["--schedulers", "verl", "--instances", "1"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """As much of a run's folder as a report is made of."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    limits = {"kv_blocks": 8, "block_size": 16, "max_num_seqs": 4, "max_model_len": 128}
    folder.write_manifest({"command": "rollout", "options": {"instances": 1}, "limits": limits, "status": "finished"})
    with EventLog(folder.events, {"source": "rollout"}) as events:
        events(Queued(0.0, 0, 0, 0, 3))
        events(Started(0.1, 0, 0, 8, None, False))
        events(Stopped(0.5, 0, 0, 8, "length"))
        events(Ended(0.5, 0, 8, "length"))
    folder.results.write_text("precious\n")
    return folder


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


def test_a_report_replaces_a_file_only_by_force(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    assert "page.html exists already" in refusal(["report", str(run.path), "--out", str(page)], capsys)
    assert page.read_text() == "mine"
    assert main(["report", str(run.path), "--out", str(page), "--force"]) == 0
    assert "<html" in page.read_text()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("name", ["results.jsonl", "run.json", "events.jsonl"])
@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_report_never_replaces_a_file_of_its_run(
    name: str, force: list[str], run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run.path / name).read_bytes()
    message = refusal(["report", str(run.path), "--out", str(run.path / name), *force], capsys)
    assert f"would replace {name} of the run" in message
    assert (run.path / name).read_bytes() == before


def test_a_link_is_followed_and_its_end_is_not_lost(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    link.symlink_to(target)
    assert "it is a link to nothing" in refusal(["report", str(run.path), "--out", str(link)], capsys)
    target.write_text("mine")
    assert "exists already" in refusal(["report", str(run.path), "--out", str(link)], capsys)
    assert main(["report", str(run.path), "--out", str(link), "--force"]) == 0
    assert link.is_symlink()
    assert "<html" in target.read_text()


def test_a_report_may_go_to_a_pipe(run: RunFolder, tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    held = os.open(pipe, os.O_WRONLY)  # when the reader is there
    assert main(["report", str(run.path), "--out", str(pipe)]) == 0
    os.close(held)
    reader.join()
    assert "<html" in read[0]


def test_a_pipe_that_nobody_reads_is_not_waited_for(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["report", str(run.path), "--out", str(tmp_path / "pipe")]) == 2
    assert "nobody reads from it" in capsys.readouterr().err


def test_a_simulation_is_replaced_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([*SIMULATION, "--out", str(out)]) == 0
    events = out / "verl" / "events.jsonl"
    before, results = events.read_bytes(), out / "results.json"
    results.write_text("mine")
    message = refusal([*SIMULATION, "--out", str(out)], capsys)
    assert "holds finish_times.svg, results.json, verl/events.jsonl and more already" in message
    assert (events.read_bytes(), results.read_text()) == (before, "mine")
    assert main([*SIMULATION, "--out", str(out), "--force"]) == 0
    assert json.loads(results.read_text())


@pytest.mark.parametrize(
    ("words", "option"),
    [(["bench", "engine", "no-such-model", "--peers", "none"], "--json"), (["profile", "no-such-model"], "--out")],
)
def test_a_measurement_is_refused_before_it_is_made(
    words: list[str], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is looked for after the file, so the message says which was first."""
    kept = tmp_path / "kept.json"
    kept.write_text("mine")
    assert f"{option} {kept} exists already" in refusal([*words, option, str(kept)], capsys)
    assert "it is a folder" in refusal([*words, option, str(tmp_path)], capsys)
    assert "there is no folder" in refusal([*words, option, str(tmp_path / "a" / "b.json")], capsys)
    assert "no-such-model" in refusal([*words, option, str(kept), "--force"], capsys)
    assert kept.read_text() == "mine"


def test_a_profile_is_written_whole(tmp_path: Path) -> None:
    profile = StepProfile(model="m", device="cpu", dtype="float32", points=(ProfilePoint(1, 1, 1, 0.1, 1, 0.0),))
    (tmp_path / "target").write_text("mine")
    (tmp_path / "profile.json").symlink_to(tmp_path / "target")
    profile.save(tmp_path / "profile.json")
    assert StepProfile.load(tmp_path / "profile.json") == profile
    assert (tmp_path / "target").read_text() == "mine"
