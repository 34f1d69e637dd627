# SPDX-License-Identifier: Apache-2.0
"""Tasks of reasoning-gym as an environment: its questions are the prompts, its score is the reward.

    tasks = ReasoningTasks(reasoning_gym.create_dataset("basic_arithmetic", size=100, seed=1), most_attempts=2)
    async for group in rollout.run(tasks.prompts(), n=8, environment=tasks): ...

A conversation's task is found by its question: the prompt's text, or the last of its messages that is one. So the
prompts may be a part of the dataset, in any order, in a run, a session or a trainer, with other messages before them.
Where the question is only a part of a message, `question_of` says what it is. A prompt without one fails by name.

The answer is what stands in <answer> tags, else the last line of the turn. With several attempts, a wrong answer is
said to be wrong, and the model may try again; the reward is that of its last attempt. The dataset is read, and answers
are scored, in threads.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from seer.environments.base import Answer, Conversation, End, Message
from seer.errors import InputError
from seer.machine.daemon_thread import in_thread
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
    """An environment over a dataset of tasks."""

    def __init__(
        self,
        dataset: TaskDataset,
        *,
        most_attempts: int = 1,
        retry: str = RETRY,
        question_of: Callable[[Conversation], str] | None = None,
    ) -> None:
        self._dataset, self._most_attempts, self._retry = dataset, most_attempts, retry
        self._question_of = question_of
        self._tasks: dict[str, list[int]] = {}  # by question; made when it is first needed
        self._making = threading.Lock()

    def prompts(self) -> Sequence[Sequence[Message]]:
        """One conversation for each task, in their order."""
        return [[{"role": "user", "content": self._dataset[i]["question"]}] for i in range(len(self._dataset))]

    async def __call__(self, conversation: Conversation) -> Answer:
        """Score the newest turn."""
        reward = await in_thread(self._score, conversation)
        is_last = conversation.turn >= self._most_attempts or conversation.finish_reason is FinishReason.LENGTH
        if is_last or reward == 1.0:
            return End(reward=reward)
        return [{"role": "user", "content": self._retry}]

    def _score(self, conversation: Conversation) -> float:
        """The score of the newest turn. Tasks with the same question are one: an answer to any of them counts."""
        answer = find_answer(conversation.text)
        entries = [self._dataset[i] for i in self._find(conversation)]
        return max(float(self._dataset.score_answer(answer, entry)) for entry in entries)

    def _find(self, conversation: Conversation) -> list[int]:
        with self._making:
            if not self._tasks:
                for i in range(len(self._dataset)):
                    self._tasks.setdefault(self._dataset[i]["question"], []).append(i)
        asked = [self._question_of(conversation)] if self._question_of is not None else _asked(conversation)
        found = next((self._tasks[one] for one in asked if isinstance(one, str) and one in self._tasks), None)
        if found is None:
            what = f"asks {asked[0]!r:.200}" if asked else "has no text"
            raise InputError(
                f"prompt {conversation.prompt_id} {what}, which is none of the {len(self._dataset)} tasks",
                hint="prompts=tasks.prompts(), or ReasoningTasks(question_of=...)",
            )
        return found


def _asked(conversation: Conversation) -> list[Any]:
    """What the prompt says, the newest first: examples may stand before the question."""
    spoken = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    prompt = conversation.messages[: spoken[len(spoken) - conversation.turn]]
    return [message["content"] for message in reversed(prompt)]


def find_answer(text: str) -> str | None:
    """The last marked answer of a text, or its last line."""
    marked = _ANSWER.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    found = marked[-1] if marked else lines[-1] if lines else None
    return None if found is None else str(found).strip()
