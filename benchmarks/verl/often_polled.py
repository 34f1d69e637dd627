# SPDX-License-Identifier: Apache-2.0
"""For gpu.py: verl's buffer of responses, looked at often. verl itself looks every two seconds for the rollout's end.

`trainer.v1.sampler.custom_sampler` names it, for both rollouts. verl loads it in the trainer's process, so trainings
that take turns (taking_turns.py) begin to do so here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from taking_turns import take_turns_if_asked

POLL_S = 0.1


class OftenPolled(ReplayBuffer):
    """`ReplayBuffer`, but for how often the trainer looks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_S)
        take_turns_if_asked()
