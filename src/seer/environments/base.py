# SPDX-License-Identifier: Apache-2.0
"""What an environment gets after each turn, and what it may answer.

    async def environment(conversation: Conversation) -> Answer:
        if "<answer>" in conversation.text:
            return End(reward=grade(conversation.text))
        return [{"role": "tool", "content": await lookup(conversation.text)}]

Rules
  1. It is called after every turn, the last one included; calls of one conversation never overlap.
  2. All that it may need is in the conversation, so a resumed run can call it anywhere. State of its own is kept by
     `Conversation.key` and rebuilt from `messages` where it is missing; `close` says that a conversation has ended.
  3. What it raises, and a deadline that it misses, ends that response as failed, and nothing else.
  4. It must not block the event loop, on which everything else runs. Plain code that waits or computes goes to a
     thread: `await seer.in_thread(function, ...)`. Not `asyncio.to_thread`: its few threads are the whole program's,
     and those that hang keep it from ending.
  5. After a turn with `finish_reason` LENGTH there is no room to go on: only a reward is taken from the answer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from seer.errors import ConfigError, InputError
from seer.types import FinishReason, Turn

Message = Mapping[str, Any]
Key = tuple[int, int]
"""Which conversation: the position of its prompt, and the index of its response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A response so far, at the end of a turn."""

    group: int
    """Position of its prompt in the run."""
    prompt_id: str
    index: int
    """Which of the group's responses it is, from 0."""
    seed: int
    turn: int
    """Turns that the model has ended, from 1."""
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    """Everything after the prompt, generated and given."""
    turns: Sequence[Turn]
    """Boundaries in `token_ids`; the last one has just ended."""
    messages: Sequence[Message]
    """The prompt's messages, or its text as one message; then each turn's text, and what the environment answered."""
    text: str
    """Of the newest turn, without special tokens; empty where the model has no tokenizer."""
    finish_reason: FinishReason
    """STOP, or LENGTH where there is no room to go on."""
    room_tokens: int
    """The most tokens that an answer may have."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the prompt's row, where a trainer has a dataset."""

    @property
    def key(self) -> Key:
        """Names the conversation within its run."""
        return self.group, self.index

    @property
    def new_token_ids(self) -> Sequence[int]:
        """The tokens of the newest turn."""
        return self.token_ids[self.turns[-1].start : self.turns[-1].end]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Go on after these messages, put into the model's chat template, or after these tokens as they are."""

    messages: Sequence[Message] = ()
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """End the response; without a reward the run's own reward function is asked, where there is one."""

    reward: float | None = None


Answer = Reply | End | Sequence[Message] | None
"""A list of messages is short for a `Reply` with them; None for `End()`."""

Environment = Callable[[Conversation], Awaitable[Answer]]


@runtime_checkable
class ClosesConversations(Protocol):
    """An environment with state of its own."""

    def close(self, key: Key) -> None:
        """A conversation has ended, for any reason. Called once for each that it was asked about."""


def settled(answer: Any) -> Reply | End:
    """An answer in one of its two long forms; refused if it is none."""
    if answer is None:
        return End()
    if isinstance(answer, Sequence) and not isinstance(answer, str | bytes):
        answer = Reply(messages=answer)
    if isinstance(answer, Reply):
        reply = Reply(messages=answer.messages, token_ids=tuple(answer.token_ids))  # an array is neither true nor false
        if bool(reply.messages) != bool(reply.token_ids):
            return reply
    if isinstance(answer, End) and (answer.reward is None or math.isfinite(answer.reward)):
        return answer if answer.reward is None else End(reward=float(answer.reward))
    raise InputError(f"it answered {answer!r:.200}", hint="messages, Reply(messages=...), or End(reward=...)")


def check_environment(environment: Any) -> None:
    """Refuse what cannot be awaited with a conversation, or does not let itself be looked at."""
    try:
        _check_call(environment)
    except ConfigError:
        raise
    except Exception as error:  # an object may do anything when it is asked for an attribute
        raise ConfigError(
            f"environment is a {type(environment).__name__} that fails when it is looked at: {type(error).__name__}",
            hint="async def environment(conversation): ...",
        ) from error


def _check_call(environment: Any) -> None:
    is_object = callable(environment) and inspect.iscoroutinefunction(type(environment).__call__)
    if not inspect.iscoroutinefunction(environment) and not is_object:
        raise ConfigError(
            f"environment is a {type(environment).__name__}, not an async function",
            hint="async def environment(conversation): ... ; plain functions: await seer.in_thread(function, ...)",
        )
    try:
        inspect.signature(environment).bind(None)
    except ValueError:  # made without a signature
        return
    except TypeError as error:
        name = getattr(environment, "__name__", type(environment).__name__)
        raise ConfigError(
            f"environment {name} cannot be called with a conversation: {error}",
            hint="it takes one argument: async def environment(conversation): ...",
        ) from None
