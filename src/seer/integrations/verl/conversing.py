# SPDX-License-Identifier: Apache-2.0
"""Conversations with the environment of `custom.seer.environment`, in the driver: verl's side of a request becomes a
submission with the environment, and its response what verl's agent loop needs.

The driver runs the environment, so a conversation is one request: while a tool works its KV rests in the pool and it
holds no sequence slot. Messages that the environment answers with are encoded by the model's chat template, with the
template and the variables that verl has for it.

Invariant: a response whose environment failed is masked as a whole, has the reward 0, and is not a lost one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from seer.engine.local.tokenizer import Tokenizer
from seer.environments.base import Answer, ClosesConversations, Conversation, Environment, Key, Message
from seer.environments.named import load_environment, load_tools
from seer.errors import ConfigError
from seer.integrations.verl.requests import GenerateRequest, Opening, Talk
from seer.integrations.verl.settings import ENVIRONMENT, TOOLS, WHERE, VerlSettings
from seer.runs.prompts import Prompt
from seer.types import FinishReason, Response, Turn

log = logging.getLogger(__name__)

_OF_VERL = ("raw_prompt", "uid", "session_id", "global_steps", "agent_name", "priority")
"""Columns that verl adds, or that are passed in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """How verl makes tokens of messages."""

    folder: Path
    """Of the tokenizer."""
    template: str | None = None
    """verl's `model.custom_chat_template`."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """verl's `data.apply_chat_template_kwargs`."""

    def codec(self) -> Tokenizer:
        """The tokenizer, for the driver."""
        if not self.folder.is_dir():
            raise ConfigError(
                f"model.path={self.folder} is no folder of the driver's machine, and {WHERE}.environment needs its "
                "tokenizer",
                hint="a folder that every machine has",
            )
        return Tokenizer(self.folder, template=self.template, variables=self.variables)


def environment_of(settings: VerlSettings) -> Environment:
    """The environment that the settings name."""
    assert settings.environment is not None, "asked where there is one"
    return load_environment(settings.environment, ENVIRONMENT)


def tools_of(settings: VerlSettings) -> Sequence[Message] | None:
    """The schemas that the settings name."""
    return None if settings.tools is None else load_tools(settings.tools, TOOLS)


def opening_of(columns: Mapping[str, Any]) -> Opening:
    """From the columns that an agent loop gets. Those that hold no plain values, as images, are left out of the row."""
    messages = columns["raw_prompt"]
    row = {name: value for name, value in columns.items() if name not in _OF_VERL}
    packed = {name: content for name, value in sorted(row.items()) if (content := _packed(value)) is not None}
    return Opening(msgspec.msgpack.encode([*messages], enc_hook=_plain), msgspec.msgpack.encode(packed))


class Conversing:
    """The driver's environment."""

    def __init__(self, settings: VerlSettings, chat: ChatTemplate, response_tokens: int) -> None:
        """A conversation has at most `response_tokens` behind its prompt, given ones included, as verl has it."""
        self._environment, self._tools = environment_of(settings), tools_of(settings)
        self._deadline_s = settings.environment_deadline_s
        self._response_tokens = response_tokens
        self.codec = chat.codec()

    def prompt(self, asked: GenerateRequest, opening: Opening) -> Prompt:
        """The prompt with its messages, which the environment sees and the template needs."""
        return Prompt(messages=tuple(msgspec.msgpack.decode(opening.messages)), id=asked.group)

    def arguments(self, asked: GenerateRequest, opening: Opening) -> dict[str, Any]:
        """What `Session.submit` gets."""
        packed: dict[str, bytes] = msgspec.msgpack.decode(opening.row)
        row = {name: msgspec.msgpack.decode(value) for name, value in packed.items()}
        return {
            "environment": _WithRow(self._environment, row),
            "environment_deadline_s": self._deadline_s,
            "tools": self._tools,
            "max_context_tokens": len(asked.prompt) + self._response_tokens,
        }


def talk_of(response: Response) -> Talk:
    """What verl gets of a conversation that has ended, or whose environment failed."""
    has_failed = failed_at_tool(response)
    if has_failed:
        log.warning("response %d of group %s is masked: %s", response.index, response.prompt_id, response.error)
    mask = response.loss_mask or [1] * len(response.token_ids)
    return Talk(
        loss_mask=[0] * len(mask) if has_failed else mask,
        reward=0.0 if has_failed else response.reward,
        num_turns=sum(turn.end > turn.start for turn in response.turns),
        tool_s=sum(_seconds(turn) for turn in response.turns if turn.kind == "given"),
    )


def failed_at_tool(response: Response) -> bool:
    """Whether its environment failed: an engine fails in a turn of the model."""
    is_at_tool = bool(response.turns) and response.turns[-1].kind == "given"
    return response.finish_reason is FinishReason.FAILED and is_at_tool


class _WithRow:
    """The user's environment, which also gets the row of the dataset."""

    def __init__(self, environment: Environment, row: Mapping[str, Any]) -> None:
        self._environment, self._row = environment, row
        self.__qualname__ = getattr(environment, "__qualname__", type(environment).__name__)

    async def __call__(self, conversation: Conversation) -> Answer:
        return await self._environment(replace(conversation, row=self._row))

    def close(self, key: Key) -> None:
        """Pass it on."""
        if isinstance(self._environment, ClosesConversations):
            self._environment.close(key)


def _seconds(turn: Turn) -> float:
    return turn.ended_s - turn.began_s if turn.began_s is not None and turn.ended_s is not None else 0.0


def _packed(value: Any) -> bytes | None:
    try:
        return msgspec.msgpack.encode(value, enc_hook=_plain)
    except (TypeError, NotImplementedError, OverflowError):
        return None


def _plain(value: Any) -> Any:
    """verl hands out numbers and lists as numpy's."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no plain value")
