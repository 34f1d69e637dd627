# SPDX-License-Identifier: Apache-2.0
"""For gpu.py --together: trainings whose steps take turns, so that each step has the GPU for itself.

Both trainings start at once, which takes minutes, and hold their memory throughout. A step of one begins when the step
of the other is over and logged; so what a GPU does faster or slower by the hour meets both. Waiting for the turn is in
none of verl's times.

A lock on a file is the turn. It goes with its process: a training that dies does not stop the others. Weights are
brought under a lock of their own: verl names the socket for them by Ray's job, and two Rays both begin with job 1.
"""

from __future__ import annotations

import fcntl
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tracking import Tracking

TURNS, STEPS = "SEER_BENCHMARK_TURNS", "SEER_BENCHMARK_STEPS"
"""Environment of a training: the file, and the number of its steps."""
HAND_OVER_S = 0.3
"""Between giving the turn up and asking for it again: whoever waits gets it."""


def take_turns_if_asked() -> None:
    """Called in the trainer's process, before it trains."""
    if TURNS in os.environ:
        path = Path(os.environ[TURNS])
        _bring_weights_alone(path.with_name(f"{path.name}.weights"))
        _take_turns(path, int(os.environ[STEPS]))


def _open_lock(path: Path) -> int:
    """A file to be locked."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _bring_weights_alone(path: Path) -> None:
    lock = _open_lock(path)

    def alone(usual: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(usual)
        def under_the_lock(self: Any) -> None:
            fcntl.flock(lock, fcntl.LOCK_EX)
            usual(self)
            fcntl.flock(lock, fcntl.LOCK_UN)

        return under_the_lock

    PPOTrainerSync.on_init_end = alone(PPOTrainerSync.on_init_end)
    PPOTrainerSync.on_step_end = alone(PPOTrainerSync.on_step_end)


def _take_turns(path: Path, num_steps: int) -> None:
    turn = _open_lock(path)
    begin, usual = PPOTrainer.on_train_begin, Tracking.log

    @functools.wraps(begin)
    def on_train_begin(self: Any) -> None:
        begin(self)
        fcntl.flock(turn, fcntl.LOCK_EX)

    @functools.wraps(usual)
    def log(self: Any, data: dict[str, Any], step: int, backend: Any = None) -> None:
        usual(self, data, step, backend)
        if any(name.startswith("timing_s/") for name in data):
            fcntl.flock(turn, fcntl.LOCK_UN)
            if step < num_steps:
                time.sleep(HAND_OVER_S)
                fcntl.flock(turn, fcntl.LOCK_EX)

    PPOTrainer.on_train_begin, Tracking.log = on_train_begin, log
