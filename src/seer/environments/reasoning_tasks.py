# SPDX-License-Identifier: Apache-2.0
"""Tasks of reasoning-gym as an environment: its questions are the prompts, its score is the reward.

    tasks = ReasoningTasks(reasoning_gym.create_dataset("basic_arithmetic", size=100, seed=1), most_attempts=2)
    async for group in rollout.run(tasks.prompts(), n=8, environment=tasks): ...

The answer is what stands in <answer> tags, else the last line of the turn. With several attempts, a wrong answer is
said to be wrong, and the model may try again; the reward is that of its last attempt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from seer.environments.base import Answer, Conversation, End, Message
from seer.types import FinishReason

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
RETRY = "That is not right. Try again."


class TaskDataset(Protocol):
    """What is used of a dataset of reasoning-gym."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """From 0 to 1."""


class ReasoningTasks:
    """An environment over a dataset of tasks; conversation i of the run is about task i."""

    def __init__(self, dataset: TaskDataset, *, most_attempts: int = 1, retry: str = RETRY) -> None:
        self._dataset, self._most_attempts, self._retry = dataset, most_attempts, retry

    def prompts(self) -> Sequence[Sequence[Message]]:
        """One conversation for each task, in their order."""
        return [[{"role": "user", "content": self._dataset[i]["question"]}] for i in range(len(self._dataset))]

    async def __call__(self, conversation: Conversation) -> Answer:
        """Score the newest turn."""
        entry = self._dataset[conversation.group % len(self._dataset)]
        reward = float(self._dataset.score_answer(find_answer(conversation.text), entry))
        is_last = conversation.turn >= self._most_attempts or conversation.finish_reason is FinishReason.LENGTH
        if is_last or reward == 1.0:
            return End(reward=reward)
        return [{"role": "user", "content": self._retry}]


def find_answer(text: str) -> str | None:
    """The last marked answer of a text, or its last line."""
    marked = _ANSWER.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    found = marked[-1] if marked else lines[-1] if lines else None
    return None if found is None else str(found).strip()
