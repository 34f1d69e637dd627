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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from seer.runs.run_folder import RunFolder
from seer.runs.training_run import TrainingRun

log = logging.getLogger(__name__)

REWARD = "critic/score/mean"
"""verl's name of a step's mean reward."""


class TrainingFolder:
    """Writes the folder of one training run; no other trainer can while it does."""

    def __init__(self, path: Path, keep_steps: int, facts: dict[str, Any]) -> None:
        """`facts` are the options and limits that run.json states."""
        self.facts = facts
        self._path = path
        self._run = TrainingRun(path, keep_steps=keep_steps)
        with _writing(path):
            self._run.begin(facts)

    def open_step(self, name: str) -> RunFolder | None:
        """The folder of a rollout that is about to begin; None where none is kept."""
        return self._run.open_step(name)

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
        with _writing(self._path):
            self._run.append("rollouts.jsonl", line)
            if REWARD in logged:
                # The report looks for the log of a step under the next number, as other trainers write it.
                self._run.append("trainer.jsonl", {"step": step + 1, "reward": logged[REWARD]})

    def close(self) -> None:
        """The training has ended."""
        with _writing(self._path):
            self._run.close()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("the record of the training in %s is not whole: %s", path, error)
