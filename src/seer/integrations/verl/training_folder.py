# SPDX-License-Identifier: Apache-2.0
"""The folder of a training run in verl, which `seer report` reads.

run.json          what was trained with what (`"command": "train"`)
rollouts.jsonl    one line per training rollout: step, weights version, times, lengths
trainer.jsonl     one line per step: the reward
step-N/           the newest rollouts as run folders of their own (run.json, events.jsonl), for the report's timeline
                  and for `seer replay`; `-val` after the number marks a validation

Invariant: what cannot be written (the disk is full) is left out with a warning; the training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from seer.runs.run_folder import RunFolder, machine

log = logging.getLogger(__name__)

REWARD = "critic/score/mean"
"""verl's name of a step's mean reward."""


class TrainingFolder:
    """Makes the folders of steps and removes the oldest."""

    def __init__(self, path: Path, keep_steps: int, facts: dict[str, Any]) -> None:
        """`facts` are the options and limits that run.json states."""
        self.facts = facts
        self._folder, self._keep_steps = RunFolder(path), keep_steps
        self._kept: list[Path] = []
        with _writing(path):
            self._folder.create()
            self._write("running")
            self._kept = sorted(path.glob("step-*"), key=lambda one: one.stat().st_mtime)

    def open_step(self, name: str) -> RunFolder | None:
        """The folder of a rollout that is about to begin; None where none is kept."""
        if not self._keep_steps:
            return None
        step = RunFolder(self._folder.path / f"step-{name}")
        self._kept = [path for path in self._kept if path != step.path]
        while len(self._kept) >= self._keep_steps:
            shutil.rmtree(self._kept.pop(0), ignore_errors=True)
        self._kept.append(step.path)
        return step

    def write_step(
        self, step: int, numbers: Mapping[str, float], since_last_s: float | None, logged: Mapping[str, float]
    ) -> None:
        """Append a training step: its rollout's numbers, and what the trainer logged."""
        responses = int(numbers["responses"])
        line = {
            "step": step,
            "call": 0,
            "mode": "train",
            "weights_version": int(numbers["weights_version"]),
            "num_responses": responses,
            "num_tokens": int(numbers["tokens"]),
            "mean_tokens": numbers["tokens"] / max(1, responses),
            "longest_tokens": int(numbers["longest_tokens"]),
            "rollout_s": numbers.get("rollout_s", 0.0),
            "tail_s": numbers.get("tail_s", 0.0),
            "since_last_s": since_last_s,
        }
        with _writing(self._folder.path):
            self._append("rollouts.jsonl", line)
            if REWARD in logged:
                # The report looks for the log of a step under the next number, as other trainers write it.
                self._append("trainer.jsonl", {"step": step + 1, "reward": logged[REWARD]})

    def close(self) -> None:
        """The training has ended."""
        with _writing(self._folder.path):
            self._write("finished")

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        with (self._folder.path / name).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _write(self, status: str) -> None:
        self._folder.write_manifest({"command": "train", **self.facts, "machine": machine(), "status": status})


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("the record of the training in %s is not whole: %s", path, error)
