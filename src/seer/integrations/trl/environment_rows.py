# SPDX-License-Identifier: Apache-2.0
"""An environment with the columns of the dataset's row: as TRL's reward functions get them, found by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from seer.environments.base import Answer, ClosesConversations, Conversation, Environment, Key, Message
from seer.integrations.trl.dataset_rows import DatasetRows, Rows
from seer.integrations.trl.groups import PromptGroup


@dataclass(slots=True)
class EnvironmentOfTrainer:
    """What `seer_rollouts(environment=...)` was given, and the rows of the trainer's datasets."""

    environment: Environment
    deadline_s: float
    tools: Sequence[Message] | None
    _rows: DatasetRows = field(default_factory=DatasetRows)

    def arguments(self, groups: Sequence[PromptGroup], trainer: Any, mode: str) -> dict[str, Any]:
        """What `Rollout.run` gets."""
        return {
            "environment": _WithRows(self.environment, groups, self._rows.of(groups, trainer, mode)),
            "environment_deadline_s": self.deadline_s,
            "tools": self.tools,
        }


class _WithRows:
    """The user's environment, which also gets the prompt as TRL has it, and its row."""

    def __init__(self, environment: Environment, groups: Sequence[PromptGroup], rows: Rows) -> None:
        self._environment, self._groups, self._rows = environment, groups, rows
        self.__qualname__ = getattr(environment, "__qualname__", type(environment).__name__)

    async def __call__(self, conversation: Conversation) -> Answer:
        group = self._groups[conversation.group]
        prompt = [{"role": "user", "content": group.prompt}] if isinstance(group.prompt, str) else group.prompt
        row = self._rows[group.key]
        return await self._environment(replace(conversation, row=row, messages=[*prompt, *conversation.messages]))

    def close(self, key: Key) -> None:
        """Pass it on."""
        if isinstance(self._environment, ClosesConversations):
            self._environment.close(key)
