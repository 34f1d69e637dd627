# SPDX-License-Identifier: Apache-2.0
"""Rewards that begin when a response ends, not when the last one does.

TRL calls reward functions after the rollout, with all completions. With `early_reward`, Seer calls the function for
each response while others are still being generated, and TRL's later call returns the rewards computed then.

    @early_reward
    async def correct(prompt, completion, answer, **row): ...

    GRPOTrainer(reward_funcs=correct, rollout_func=seer_rollouts(reward=correct), ...)

The function gets the prompt, the completion (both as TRL would pass them) and the other columns of the dataset's
row. It may be a coroutine function; a plain one runs in a thread.

Invariants
  1. A reward that fails or is late is reported by name and is None, which TRL leaves out of its group's baseline;
     generation and other rewards go on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from seer.errors import ConfigError
from seer.integrations.trl.dataset_rows import DatasetRows
from seer.integrations.trl.groups import PromptGroup
from seer.runs.prompts import Prompt
from seer.runs.rewards import RewardFunction
from seer.types import Response

REWARDS = "seer_reward"
"""The column that carries computed rewards from the rollout to TRL's reward call."""


class EarlyReward:
    """A reward function of one response that TRL can call for many."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)
        self.__name__: str = getattr(function, "__name__", type(function).__name__)  # what TRL's metrics call it

    def __call__(self, **columns: Any) -> list[float | None]:
        """TRL's call after the rollout: return the rewards computed during it."""
        rewards: list[float | None] | None = columns.get(REWARDS)
        if rewards is None:
            raise ConfigError(
                f"the reward {self.__name__} was not given to the rollout",
                hint=f"rollout_func=seer_rollouts(reward={self.__name__})",
            )
        return rewards


def early_reward(function: Callable[..., Any]) -> EarlyReward:
    """Decorator: compute this reward as each response ends."""
    return EarlyReward(function)


class RewardsByRow:
    """Calls an early reward with the columns of the dataset's row, which it finds by prompt."""

    def __init__(self, reward: EarlyReward, deadline_s: float) -> None:
        self._reward = reward
        self.deadline_s = deadline_s
        """Of each call."""
        self._rows = DatasetRows()

    def function(self, groups: Sequence[PromptGroup], trainer: Any, mode: str) -> RewardFunction:
        """The reward function of a rollout, as `Rollout.run` takes it."""
        known = self._rows.of(groups, trainer, mode)
        reward, tokenizer = self._reward, trainer.processing_class

        def arguments(response: Response) -> dict[str, Any]:
            group = groups[response.group]
            text = tokenizer.decode(response.token_ids, skip_special_tokens=True)
            completion = text if isinstance(group.prompt, str) else [{"role": "assistant", "content": text}]
            return known[group.key] | {"prompt": group.prompt, "completion": completion}

        async def begin(prompt: Prompt, response: Response) -> float:
            return float(await reward.function(**arguments(response)))

        def compute(prompt: Prompt, response: Response) -> float:
            return float(reward.function(**arguments(response)))

        chosen: RewardFunction = begin if inspect.iscoroutinefunction(reward.function) else compute
        chosen.__qualname__ = reward.__name__  # what errors call it
        return chosen


def environment_reward(**columns: Any) -> list[float | None]:
    """For TRL's `reward_funcs`: the rewards that the environment of `seer_rollouts(environment=...)` gave."""
    rewards: list[float | None] | None = columns.get(REWARDS)
    if rewards is None:
        raise ConfigError("there is no environment", hint="rollout_func=seer_rollouts(environment=...)")
    return rewards
