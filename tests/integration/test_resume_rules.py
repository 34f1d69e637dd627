# SPDX-License-Identifier: Apache-2.0
"""What `--resume` trusts: nothing outside the run's folder is written, and a start may be killed at any moment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from seer.cli.main import main
from seer.hosting.fleet import HostedFleet
from seer.runs.journal import Journal
from seer.runs.run_folder import RunFolder

NUM_PROMPTS, N = 4, 2


class Killed(BaseException):
    """Nothing runs after it but what the operating system would do."""


def a_prompt_file(folder: Path) -> Path:
    path = folder / "given.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": [1, 2, 3 + i]}) + "\n" for i in range(NUM_PROMPTS)))
    return path


def words(prompts: Path, run: Path, *more: str) -> list[str]:
    fleet = ["--engine", "fake", "--instances", "1", "--no-pin", "--quiet", "--json", "--max-tokens", "40"]
    return ["rollout", "--prompts", str(prompts), "--n", str(N), "--run-dir", str(run), *fleet, *more]


def resume(run: Path, *more: str) -> int:
    return main(["rollout", "--resume", str(run), "--quiet", "--json", *more])


def reopen(run: Path) -> None:
    """As if the driver had been killed before the last chunk's line."""
    journal = run / "journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))
    (run / "results.jsonl").unlink()


def tokens_in(path: Path) -> dict[tuple[str, int], list[int]]:
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    return {(one["prompt_id"], one["index"]): one["token_ids"] for one in records}


def killed(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, arguments: list[str], *, half: bool = False) -> None:
    """Run until `owner.name` is called, or until the call is half done: its file is written in part."""
    whole = getattr(owner, name)

    def die(*args: Any, **kwargs: Any) -> None:
        if half:
            made = whole(*args, **kwargs)
            if isinstance(made, Journal):
                made.close()  # as the kernel does
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, die)
        with pytest.raises(Killed):
            main(arguments)


KILLS = {
    "before the prompts": (RunFolder, "create", False),
    "after the prompts": (RunFolder, "create", True),
    "before the journal": (Journal, "create", False),
    "after the journal": (Journal, "create", True),
    "before run.json": (RunFolder, "write_manifest", False),
    "after run.json": (RunFolder, "write_manifest", True),
    "before the instances": (HostedFleet, "start", False),
}


@pytest.mark.parametrize("moment", KILLS)
def test_a_start_that_was_killed_is_resumed_or_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    owner, name, half = KILLS[moment]
    prompts, run = a_prompt_file(tmp_path), tmp_path / "run"
    killed(monkeypatch, owner, name, words(prompts, run), half=half)
    if (run / "run.json").exists():
        assert resume(run) == 0
    else:
        assert resume(run) == 2
        assert "holds no run.json" in capsys.readouterr().err
        assert main(words(prompts, run)) == 0
    assert len(tokens_in(run / "results.jsonl")) == NUM_PROMPTS * N


@pytest.mark.parametrize("part", [0, 10])
def test_a_journal_that_was_cut_at_its_first_line_blocks_no_start(tmp_path: Path, part: int) -> None:
    prompts, run = a_prompt_file(tmp_path), tmp_path / "run"
    run.mkdir()
    (run / "journal.jsonl").write_bytes(b'{"type":"seer-journal"'[:part])
    assert main(words(prompts, run)) == 0


@pytest.mark.parametrize("name", ["journal.jsonl", "results.jsonl", "events.jsonl", "prompts.jsonl"])
def test_files_of_a_run_without_run_json_are_not_taken_for_a_killed_start(tmp_path: Path, name: str) -> None:
    prompts, run = a_prompt_file(tmp_path), tmp_path / "run"
    run.mkdir()
    (run / name).write_text("line\nline\n")
    assert main(words(prompts, run)) == 2
    assert (run / name).read_text() == "line\nline\n"


def test_a_forced_start_that_was_killed_leaves_no_run_json_of_the_old_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, run = a_prompt_file(tmp_path), tmp_path / "run"
    assert main(words(prompts, run)) == 0
    killed(monkeypatch, Journal, "create", words(prompts, run, "--force", "--n", "1"))
    assert resume(run) == 2
    assert main(words(prompts, run, "--force")) == 0


def edit_config(run: Path, **changes: Any) -> None:
    manifest = json.loads((run / "run.json").read_text())
    manifest["config"] |= changes
    (run / "run.json").write_text(json.dumps(manifest))


def test_run_json_does_not_say_where_results_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, run, outside = a_prompt_file(tmp_path), tmp_path / "run", tmp_path / "home" / "authorized_keys"
    assert main(words(prompts, run)) == 0
    edit_config(run, out=str(outside))
    assert resume(run) == 2
    assert "go to another folder" in capsys.readouterr().err
    assert not outside.parent.exists()
    assert resume(run, "--out", str(outside)) == 0  # whoever resumes says so
    assert len(tokens_in(outside)) == NUM_PROMPTS * N


@pytest.mark.parametrize(
    "name", ["results.jsonl", "journal.jsonl", "instance-0.log", "events.jsonl", "run.json.partial"]
)
def test_links_in_a_run_folder_lead_nowhere(tmp_path: Path, name: str) -> None:
    prompts, run, outside = a_prompt_file(tmp_path), tmp_path / "run", tmp_path / "outside"
    assert main(words(prompts, run)) == 0
    reopen(run)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside)
    assert resume(run) == (0 if name in ("events.jsonl", "run.json.partial") else 2)
    assert not os.path.lexists(outside)


def test_logs_of_a_resumed_run_go_to_its_folder(tmp_path: Path) -> None:
    prompts, run = a_prompt_file(tmp_path), tmp_path / "run"
    assert main(words(prompts, run)) == 0
    manifest = json.loads((run / "run.json").read_text())
    manifest["config"]["rollout"]["hosting"]["log_dir"] = str(tmp_path / "elsewhere")
    (run / "run.json").write_text(json.dumps(manifest))
    reopen(run)
    (run / "instance-0.log").unlink()
    assert resume(run) == 0
    assert not (tmp_path / "elsewhere").exists()
    assert (run / "instance-0.log").exists()


def test_the_hint_of_an_interrupted_run_repeats_its_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from seer.errors import InstanceError
    from seer.hosting import ProcessInstance

    def refuse(self: ProcessInstance, chunk: object) -> None:
        raise InstanceError("no chunk is taken")

    monkeypatch.setattr(ProcessInstance, "submit", refuse)
    prompts, run, out = a_prompt_file(tmp_path), tmp_path / "run", tmp_path / "my results.jsonl"
    assert main(words(prompts, run, "--out", str(out))) == 1
    assert f"--resume {run} --out '{out}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--n 5", "--max-tokens 41", "--seed 3", "--temperature 0.5", "--set sampling.top_k=4"]
)
def test_an_option_that_would_change_the_tokens_of_a_run_is_refused_with_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    run = tmp_path / "run"
    assert main(words(a_prompt_file(tmp_path), run)) == 0
    before = {path: path.read_bytes() for path in run.iterdir()}
    assert resume(run, *option.split()) == 2
    assert "another engine, prompts, sampling or seed" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize("option", ["--preset cpu-demo", "--prompts given.jsonl", "--run-dir other"])
def test_an_option_of_a_new_run_is_refused_with_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    run = tmp_path / "run"
    assert main(words(a_prompt_file(tmp_path), run)) == 0
    assert resume(run, *option.split()) == 2
    assert f"hint: leave {option.split(maxsplit=1)[0]} out" in capsys.readouterr().err


def test_an_option_that_changes_no_token_holds_for_what_is_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(words(a_prompt_file(tmp_path), run)) == 0
    tokens = tokens_in(run / "results.jsonl")
    reopen(run)
    assert resume(run, "--instances", "2", "--scheduler", "verl") == 0
    assert tokens_in(run / "results.jsonl") == tokens
    options = json.loads((run / "run.json").read_text())["options"]
    assert (options["instances"], options["scheduler"]) == (2, "verl")


def test_a_resumed_run_keeps_the_event_logs_of_its_earlier_parts(tmp_path: Path) -> None:
    prompts, run = a_prompt_file(tmp_path), tmp_path / "run"
    assert main(words(prompts, run)) == 0
    first = (run / "events.jsonl").read_bytes()
    reopen(run)
    assert resume(run) == 0
    second = (run / "events.jsonl").read_bytes()
    reopen(run)
    assert resume(run) == 0
    assert [path.read_bytes() for path in RunFolder(run).earlier_events] == [first, second]
    assert main(words(prompts, run, "--force")) == 0
    assert not RunFolder(run).earlier_events, "they were of the run that was replaced"


def measured(run: Path) -> dict[str, Any]:
    """What a run was measured to be, which only a part that generates something may change."""
    manifest = json.loads((run / "run.json").read_text())
    logs = [path.name for path in [run / "events.jsonl", *RunFolder(run).earlier_events]]
    facts = ("summary", "options", "limits", "nodes", "lost_instances")
    return {name: manifest[name] for name in facts} | {name: (run / name).read_bytes() for name in logs}


def test_a_finished_run_is_resumed_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, run = a_prompt_file(tmp_path), tmp_path / "run"
    assert main(words(prompts, run)) == 0
    printed = capsys.readouterr().out
    before = {path: path.read_bytes() for path in run.iterdir()}
    monkeypatch.setattr(HostedFleet, "start", None)  # nothing is started
    assert resume(run, "--instances", "2") == 0
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    shown = capsys.readouterr()
    assert shown.out == printed
    assert shown.err == "the run had finished: nothing is left of it\n"


@pytest.mark.parametrize("words_more", [["--force"], ["--out", "OTHER"], []])
def test_results_that_are_written_again_leave_what_was_measured(
    tmp_path: Path, words_more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, run, other = a_prompt_file(tmp_path), tmp_path / "run", tmp_path / "other.jsonl"
    assert main(words(prompts, run)) == 0
    tokens, before = tokens_in(run / "results.jsonl"), measured(run)
    if not words_more:
        (run / "results.jsonl").unlink()
    capsys.readouterr()
    assert resume(run, "--instances", "2", *(str(other) if word == "OTHER" else word for word in words_more)) == 0
    assert measured(run) == before
    assert json.loads(capsys.readouterr().out)["summary"] == before["summary"]
    assert tokens_in(other if "OTHER" in words_more else run / "results.jsonl") == tokens


def test_a_run_that_was_killed_after_its_last_chunk_is_finished_without_a_summary(tmp_path: Path) -> None:
    """Nobody measured it to its end."""
    prompts, run = a_prompt_file(tmp_path), tmp_path / "run"
    assert main(words(prompts, run)) == 0
    manifest = json.loads((run / "run.json").read_text())
    killed = {key: manifest[key] for key in ("command", "options", "config", "machine", "limits", "nodes")}
    (run / "run.json").write_text(json.dumps(killed | {"status": "running"}))
    (run / "results.jsonl").unlink()
    assert resume(run) == 0
    manifest = json.loads((run / "run.json").read_text())
    assert (manifest["status"], manifest["num_responses"], manifest.get("summary")) == ("finished", 8, None)
    assert len(tokens_in(run / "results.jsonl")) == 8
    assert main(["report", str(run)]) == 0


HALF = "\ud800"


def test_half_a_character_in_a_prompt_or_its_id_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt_token_ids": [1], "id": "a\\ud800"}\n{"prompt_token_ids": [1], "id": "b"}\n')
    assert main(words(path, tmp_path / "run")) == 2
    printed = capsys.readouterr().err
    assert "line 1: " in printed
    assert "this is a bug" not in printed
    assert not (tmp_path / "run").exists()


def test_line_separators_of_unicode_are_part_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    text = '{"prompt_token_ids": [1], "id": "a\u2028b\u2029c\x85d"}\n{"prompt_token_ids": [2], "id": "b"}\n'
    path.write_text(text, encoding="utf-8")
    assert main(words(path, tmp_path / "run")) == 0
    tokens = tokens_in(tmp_path / "run" / "results.jsonl")
    assert {prompt for prompt, _ in tokens} == {"a\u2028b\u2029c\x85d", "b"}
    assert resume(tmp_path / "run") == 0


def test_a_path_that_is_not_utf_8_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run\xff"))
    assert main(words(a_prompt_file(tmp_path), run)) == 2
    assert "not UTF-8" in capsys.readouterr().err
