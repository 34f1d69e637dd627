# SPDX-License-Identifier: Apache-2.0
"""`seer rollout` and its companions as a user runs them, in processes of their own, on the fake engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults import children_of
from seer.cli.main import main
from seer.errors import InstanceError
from seer.hosting import ProcessInstance
from seer.hosting.fleet import HostedFleet
from seer.types import Chunk

DEADLINE_S = 60


def a_prompt_file(folder: Path, num: int = 6, *extra: str) -> Path:
    path = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt_token_ids": [1, 2, 3 + i], "id": f"p{i}"}) for i in range(num)]
    path.write_text("\n".join([*lines, *extra]) + "\n")
    return path


def arguments(prompts: Path, run_dir: Path, *more: str) -> list[str]:
    fleet = ["--engine", "fake", "--instances", "2", "--no-pin", "--quiet", "--json"]
    return [
        "rollout",
        "--prompts",
        str(prompts),
        "--n",
        "3",
        "--max-tokens",
        "90",
        "--run-dir",
        str(run_dir),
        *fleet,
        *more,
    ]


def tokens_in(path: Path) -> dict[tuple[str, int], list[int]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {(r["prompt_id"], r["index"]): r["token_ids"] for r in records}


def test_a_rollout_leaves_results_events_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(a_prompt_file(tmp_path), tmp_path / "run")) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["status"] == "finished"
    assert shown["summary"]["num_requests"] == 18
    tokens = tokens_in(tmp_path / "run" / "results.jsonl")
    assert len(tokens) == 18
    record = json.loads((tmp_path / "run" / "results.jsonl").read_text().splitlines()[0])
    assert {
        "text",
        "token_ids",
        "logprobs",
        "finish_reason",
        "weights_version",
        "started_s",
        "finished_s",
    } <= record.keys()
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert manifest["status"] == "finished"
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Where did the time go?" in page
    assert "://" not in page  # nothing is loaded from elsewhere
    assert json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]


def test_bad_prompts_are_listed_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = a_prompt_file(tmp_path, 2, "{oops", '{"prompt": "needs a tokenizer"}', '{"prompt_token_ids": []}')
    long = json.dumps({"prompt_token_ids": [1] * 9000})
    prompts.write_text(prompts.read_text() + long + "\n")
    assert main(arguments(prompts, tmp_path / "run")) == 2
    printed = capsys.readouterr().err
    for line in (3, 4, 5, 6):
        assert f"line {line}:" in printed
    assert "hint: --skip-bad" in printed
    assert not (tmp_path / "run").exists()
    assert main(arguments(prompts, tmp_path / "run", "--skip-bad")) == 0
    assert "going on without 4 bad prompts" in capsys.readouterr().err
    assert len(tokens_in(tmp_path / "run" / "results.jsonl")) == 6


@pytest.mark.parametrize(
    ("more", "printed"),
    [
        (["--scheduler", "sear"], "did you mean seer?"),
        (["--instances", "0"], "instances=0"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--n", "0"], "n=0"),
        (["--engine", "vllm-2"], "unknown engine"),
        (["--kv-memory", "lots"], "not a size"),
    ],
)
def test_impossible_settings_are_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], printed: str
) -> None:
    try:
        code = main(arguments(a_prompt_file(tmp_path), tmp_path / "run", *more))
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    assert code == 2
    assert printed in capsys.readouterr().err


def slow(prompts: Path, run_dir: Path) -> subprocess.Popen[str]:
    """A rollout that takes long enough to be interrupted: the fake engine's steps take 10 ms."""
    words = arguments(prompts, run_dir, "--max-tokens", "300", "--set", "rollout.engine_settings.step_s=0.01")
    return subprocess.Popen(
        [sys.executable, "-m", "seer.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def wait_for_journal(run_dir: Path, num_lines: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    journal = run_dir / "journal.jsonl"
    while not (journal.exists() and journal.read_bytes().count(b"\n") > num_lines):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run writes no journal"
        time.sleep(0.02)


def expected(prompts: Path, tmp_path: Path, *more: str) -> dict[tuple[str, int], list[int]]:
    assert main(arguments(prompts, tmp_path / "whole", "--max-tokens", "300", *more)) == 0
    return tokens_in(tmp_path / "whole" / "results.jsonl")


def resume(run_dir: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "seer.cli.main", "rollout", "--resume", str(run_dir), "--json", "--quiet"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


def test_a_killed_run_is_resumed_without_losing_a_finished_chunk(tmp_path: Path) -> None:
    prompts, run_dir = a_prompt_file(tmp_path), tmp_path / "run"
    process = slow(prompts, run_dir)
    wait_for_journal(run_dir, 8, process)
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    journal = (run_dir / "journal.jsonl").read_bytes()
    deadline = time.monotonic() + DEADLINE_S
    while children_of(run_dir):  # they follow their driver at once; nobody sends them anything
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.02)
    resume(run_dir)
    assert (run_dir / "journal.jsonl").read_bytes().startswith(journal[: journal.rfind(b"\n") + 1])
    assert tokens_in(run_dir / "results.jsonl") == expected(prompts, tmp_path)


def test_ctrl_c_keeps_what_was_finished_and_leaves_no_process(tmp_path: Path) -> None:
    prompts, run_dir = a_prompt_file(tmp_path), tmp_path / "run"
    process = slow(prompts, run_dir)
    wait_for_journal(run_dir, 8, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert json.loads(out)["status"] == "interrupted"
    assert "Traceback" not in err
    assert children_of(run_dir) == []
    cut = tokens_in(run_dir / "results.jsonl")
    assert len(cut) == 18
    whole = expected(prompts, tmp_path)
    assert all(whole[key][: len(ids)] == ids for key, ids in cut.items())
    assert any(ids for ids in cut.values())
    resume(run_dir)
    assert tokens_in(run_dir / "results.jsonl") == whole


def test_a_second_driver_is_refused_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, run_dir = a_prompt_file(tmp_path), tmp_path / "run"
    process = slow(prompts, run_dir)
    wait_for_journal(run_dir, 4, process)
    for words in (["rollout", "--resume", str(run_dir), "--quiet"], arguments(prompts, run_dir)):
        assert main(words) == 2
        printed = capsys.readouterr().err
        assert f"error: {run_dir} is in use" in printed
        assert f"hint: process {process.pid} holds it" in printed
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert list(run_dir.glob("*.lock")) == []
    assert tokens_in(run_dir / "results.jsonl") == expected(prompts, tmp_path)
    assert len((run_dir / "results.jsonl").read_text().splitlines()) == 18


def test_resuming_with_other_prompts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    assert main(arguments(a_prompt_file(tmp_path), run_dir)) == 0
    (run_dir / "prompts.jsonl").write_text('{"prompt_token_ids": [9]}\n')
    assert main(["rollout", "--resume", str(run_dir), "--quiet"]) == 2
    assert "another engine, prompts" in capsys.readouterr().err
    assert main(["rollout", "--resume", str(tmp_path / "absent")]) == 2


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: (run / "journal.jsonl").unlink(),
        lambda run: (run / "journal.jsonl").write_bytes((run / "journal.jsonl").read_bytes().splitlines(True)[0]),
        lambda run: (run / "journal.jsonl").write_text("hello\n"),
        lambda run: (run / "prompts.jsonl").unlink(),
        lambda run: (run / "prompts.jsonl").write_text('{"prompt_token_ids": [9]}\n'),
        lambda run: (run / "results.jsonl").write_text("notes of mine\n"),
    ],
    ids=["no journal", "cut journal", "no such journal", "no prompts", "other prompts", "other results"],
)
def test_a_resume_that_cannot_work_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object]
) -> None:
    run_dir = tmp_path / "run"
    assert main(arguments(a_prompt_file(tmp_path), run_dir)) == 0
    damage(run_dir)
    before = contents(tmp_path)
    assert main(["rollout", "--resume", str(run_dir), "--quiet"]) == 2
    assert contents(tmp_path) == before
    assert "error: " in capsys.readouterr().err


def test_a_finished_run_is_resumed_to_the_same_results_and_a_removed_file_comes_back(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert main(arguments(a_prompt_file(tmp_path), run_dir)) == 0
    whole = tokens_in(run_dir / "results.jsonl")
    resume(run_dir)
    assert tokens_in(run_dir / "results.jsonl") == whole
    (run_dir / "results.jsonl").unlink()
    resume(run_dir)
    assert tokens_in(run_dir / "results.jsonl") == whole


def test_a_run_that_was_killed_before_its_first_chunk_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, run_dir = a_prompt_file(tmp_path), tmp_path / "run"

    async def die(self: HostedFleet) -> None:
        raise InstanceError("no instance starts")

    with monkeypatch.context() as patched:
        patched.setattr(HostedFleet, "start", die)
        assert main(arguments(prompts, run_dir)) == 1
    assert not (run_dir / "results.jsonl").exists()
    resume(run_dir)
    assert len(tokens_in(run_dir / "results.jsonl")) == 18


@pytest.mark.parametrize("out", ["here.jsonl", "prompts.jsonl", "link.jsonl", "folder", "pipe", "run/journal.jsonl"])
def test_an_out_that_would_lose_a_file_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    prompts = a_prompt_file(tmp_path)
    (tmp_path / "here.jsonl").write_text("mine")
    (tmp_path / "link.jsonl").symlink_to(prompts)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = contents(tmp_path)
    assert main(arguments(prompts, tmp_path / "run", "--out", str(tmp_path / out))) == 2
    assert str(tmp_path / out) in capsys.readouterr().err
    assert contents(tmp_path) == before
    if out == "here.jsonl":
        assert main(arguments(prompts, tmp_path / "run", "--out", str(tmp_path / out), "--force")) == 0
        assert len(tokens_in(tmp_path / out)) == 18
    else:
        assert main(arguments(prompts, tmp_path / "run", "--out", str(tmp_path / out), "--force")) == 2
        assert contents(tmp_path) == before
    assert not list(tmp_path.rglob("*.partial"))


def test_an_earlier_run_is_replaced_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, run_dir = a_prompt_file(tmp_path), tmp_path / "run"
    assert main(arguments(prompts, run_dir)) == 0
    before = contents(tmp_path)
    assert main(arguments(prompts, run_dir)) == 2
    assert "--force" in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert main(arguments(prompts, run_dir, "--n", "2", "--force")) == 0
    assert len(tokens_in(run_dir / "results.jsonl")) == 12


def test_other_prompts_in_the_folder_of_a_run_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    given = a_prompt_file(tmp_path / "given")
    (tmp_path / "prompts.jsonl").write_text("mine")
    assert main(arguments(given, tmp_path)) == 2
    assert (tmp_path / "prompts.jsonl").read_text() == "mine"
    assert main(arguments(given, given.parent)) == 0  # the very file that was given may be there
    assert len(tokens_in(given.parent / "results.jsonl")) == 18


@pytest.mark.parametrize("num_failed", [18, 1], ids=["all", "one"])
def test_failed_responses_are_counted_and_make_the_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_failed: int
) -> None:
    submit = ProcessInstance.submit

    def refuse(self: ProcessInstance, chunk: Chunk) -> None:
        if chunk.request < num_failed:
            raise InstanceError("no chunk is taken")
        submit(self, chunk)

    run_dir = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(ProcessInstance, "submit", refuse)
        assert main(arguments(a_prompt_file(tmp_path), run_dir)) == 1
    printed = capsys.readouterr()
    shown = json.loads(printed.out)
    assert (shown["num_failed"], shown["num_responses"]) == (num_failed, 18)
    *_, error, hint = printed.err.splitlines()
    assert error == f"error: {num_failed} of 18 responses failed; the first: no chunk is taken"
    assert hint == f"hint: seer rollout --resume {run_dir} tries them again"
    assert json.loads((run_dir / "run.json").read_text())["num_failed"] == num_failed
    assert resume(run_dir)["num_failed"] == 0
    assert all(tokens_in(run_dir / "results.jsonl").values())
