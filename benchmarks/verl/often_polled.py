# SPDX-License-Identifier: Apache-2.0
"""For gpu.py: verl's buffer of responses, looked at often. verl itself looks every two seconds for the rollout's end.

`trainer.v1.sampler.custom_sampler` names it, for both rollouts.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_S = 0.1


class OftenPolled(ReplayBuffer):
    """`ReplayBuffer`, but for how often the trainer looks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_S)
