# SPDX-License-Identifier: Apache-2.0
"""Trainers remove only steps that they wrote, one at a time, and refuse folders that hold something else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seer.errors import InputError
from seer.integrations.trl.record import TrainingRecord
from seer.integrations.verl.training_folder import TrainingFolder
from seer.runs.run_folder import RunFolder
from seer.types import InstanceLimits

FACTS: dict[str, Any] = {"options": {"instances": 1}, "limits": None}
ROLLOUT = {"command": "rollout", **FACTS}


class OfTrl:
    """As much of the TRL adapter as writes the folder."""

    def __init__(self, path: Path, keep_steps: int) -> None:
        self._record = TrainingRecord(path, keep_steps=keep_steps)
        limits = InstanceLimits(kv_blocks=1, block_size=1, max_num_seqs=1, max_model_len=1)
        fleet: Any = SimpleNamespace(limits=[limits])
        self._record.begin(FACTS["options"], fleet)

    def step(self, number: int) -> RunFolder | None:
        settings: Any = SimpleNamespace(step=number, mode="train", sampling=SimpleNamespace(max_tokens=1), group_size=1)
        return self._record.open_step(settings, 0)

    def close(self) -> None:
        self._record.end()


class OfVerl:
    """As much of the verl adapter as writes the folder."""

    def __init__(self, path: Path, keep_steps: int) -> None:
        self._folder = TrainingFolder(path, keep_steps, FACTS)

    def step(self, number: int) -> RunFolder | None:
        step = self._folder.open_step(f"{number:06d}")
        if step is not None:
            step.create()
            step.write_manifest(ROLLOUT)
        return step

    def close(self) -> None:
        self._folder.close()


def test_unlike_instances_are_recorded_each_with_its_limits(tmp_path: Path) -> None:
    large = InstanceLimits(kv_blocks=9, block_size=1, max_num_seqs=4, max_model_len=9)
    small = replace(large, kv_blocks=3, max_num_seqs=1)
    record = TrainingRecord(tmp_path, keep_steps=1)
    record.begin({"instances": 2}, SimpleNamespace(limits=[large, small]))  # type: ignore[arg-type]
    settings: Any = SimpleNamespace(step=1, mode="train", sampling=SimpleNamespace(max_tokens=1), group_size=1)
    step = record.open_step(settings, 0)
    record.end()
    assert step is not None
    for folder in (step, record.folder):
        assert [one.as_limits() for one in folder.read_facts().limits_of_all(2)] == [large, small]


Trainer = Callable[[Path, int], OfTrl | OfVerl]
both = pytest.mark.parametrize("trainer", [OfTrl, OfVerl])


def names(path: Path) -> set[str]:
    return {one.name for one in path.iterdir()}


def as_link(path: Path) -> None:
    target = path.parent.parent / "elsewhere"
    target.mkdir()
    (target / "run.json").write_text(json.dumps(ROLLOUT))
    path.symlink_to(target)


def as_rollout(path: Path) -> None:
    """What `seer rollout --run-dir step-000010` leaves."""
    path.mkdir()
    (path / "run.json").write_text(json.dumps(ROLLOUT | {"config": {"n": 1}}))


def as_checkpoint(path: Path) -> None:
    path.mkdir()
    (path / "model.safetensors").write_text("precious")


FOREIGN = {
    "a checkpoint": ("step-10", as_checkpoint),
    "a checkpoint with a step's name": ("step-000010", as_checkpoint),
    "a run of its own": ("step-000010", as_rollout),
    "a link to a step": ("step-000010", as_link),
}


@both
@pytest.mark.parametrize("what", FOREIGN)
def test_a_folder_with_steps_that_no_trainer_wrote_is_refused_before_anything_is_written(
    trainer: Trainer, what: str, tmp_path: Path
) -> None:
    name, make = FOREIGN[what]
    run = tmp_path / "run"
    run.mkdir()
    make(run / name)
    with pytest.raises(InputError, match=f"{name} is not a step that a trainer of Seer wrote"):
        trainer(run, 1)
    assert names(run) == {name}


@both
@pytest.mark.parametrize("command", ["rollout", "compare"])
def test_a_folder_of_another_kind_of_run_is_refused(trainer: Trainer, command: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(ROLLOUT | {"command": command}))
    with pytest.raises(InputError, match=f"holds a run of `seer {command}`"):
        trainer(tmp_path, 1)
    assert names(tmp_path) == {"run.json"}
    assert json.loads((tmp_path / "run.json").read_text())["command"] == command


@both
def test_lines_of_nobody_are_not_appended_to(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text("mine\n")
    with pytest.raises(InputError, match=r"holds rollouts.jsonl, and no run.json"):
        trainer(tmp_path, 1)


@both
def test_a_training_folder_has_one_writer(trainer: Trainer, tmp_path: Path) -> None:
    first = trainer(tmp_path, 2)
    first.step(1)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(InputError, match="is in use by another run"):
        trainer(tmp_path, 1)
    assert (tmp_path / "run.json").read_bytes() == before
    first.close()
    assert names(tmp_path) == {"run.json", "step-000001"}, "the lock is gone"
    second = trainer(tmp_path, 1)  # the training goes on
    second.step(2)
    second.close()
    second.close()
    assert names(tmp_path) == {"run.json", "step-000002"}
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "finished"


@both
def test_a_step_with_a_file_of_the_user_stays(
    trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = trainer(tmp_path, 1)
    for number in (1, 2, 3):
        step = training.step(number)
        assert step is not None
        step.report.write_text("of `seer report`")
        if number == 1:
            (step.path / "notes.md").write_text("mine")
    training.close()
    assert names(tmp_path) == {"run.json", "step-000001", "step-000003"}
    assert names(tmp_path / "step-000001") == {"run.json", "report.html", "notes.md"}
    assert "notes.md in it is not of this training" in caplog.text


@both
def test_a_step_that_was_replaced_since_stays(trainer: Trainer, tmp_path: Path) -> None:
    training = trainer(tmp_path, 1)
    step = training.step(1)
    assert step is not None
    step.manifest.unlink()
    step.path.rmdir()
    as_checkpoint(step.path)
    training.step(2)
    training.close()
    assert names(step.path) == {"model.safetensors"}


def test_lines_are_not_appended_through_a_link(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path / "run", 1, FACTS)
    (tmp_path / "precious").write_text("mine\n")
    numbers = {"responses": 1.0, "weights_version": 1.0, "tokens": 1.0, "longest_tokens": 1.0}
    (tmp_path / "run/rollouts.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match=r"rollouts.jsonl is a link or a pipe"):
        folder.write_step(1, numbers, None, {})
    (tmp_path / "run/rollouts.jsonl").unlink()
    os.mkfifo(tmp_path / "run/rollouts.jsonl")
    with pytest.raises(InputError, match="a link or a pipe"):  # and does not wait for a reader
        folder.write_step(1, numbers, None, {})
    assert (tmp_path / "precious").read_text() == "mine\n"


def test_a_step_that_a_kill_left_empty_is_no_foreign_one(tmp_path: Path) -> None:
    (tmp_path / "step-000001").mkdir(parents=True)
    training = OfVerl(tmp_path, 1)
    training.step(2)
    training.close()
    assert names(tmp_path) == {"run.json", "step-000002"}
