# SPDX-License-Identifier: Apache-2.0
"""Calls environments when turns end, and lets requests go on, end or fail as they answer.

One task per conversation at its tool, which awaits the call in another (seer.runs.user_calls): hundreds may wait at
once, and none can keep its response. The rollout loop hands requests over by `on_turn`; the answers go back by its
`answer`, `conclude` and `fail_at_tool`.

Invariants
  1. Every request that was handed over is answered, concluded or failed, or ends by a cancellation before that. An
     answer that comes after its request has ended is dropped.
  2. What an environment does wrong ends its own response, and nothing else.

Waits for                                    unblocked by
  an environment's answer (task)               the answer, `deadline_s`, the request's end, `close`
  these tasks (`close`)                        their cancellation: they are ours, and swallow none
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from seer.buffer import Request, RequestState
from seer.engine.text_codec import TextCodec
from seer.environments.base import (
    ClosesConversations,
    Conversation,
    End,
    Environment,
    Message,
    Reply,
    settled,
)
from seer.environments.given_tokens import checked_tokens, given_tokens
from seer.rollout import RolloutLoop
from seer.runs.prompts import Prompt
from seer.runs.user_calls import UserCalls, name_of, reason
from seer.types import FinishReason, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentCalls:
    """An environment and how it is called."""

    environment: Environment
    deadline_s: float = 60.0
    tools: Sequence[Message] | None = None
    """Schemas, for the chat template."""
    vocab_size: int | None = None
    """Token ids that it gives must be below this."""

    @property
    def name(self) -> str:
        """For messages to people."""
        return name_of(self.environment)


@dataclass(slots=True)
class _Open:
    """A conversation that has not ended."""

    calls: EnvironmentCalls
    messages: list[Message]
    """All before the newest turn."""
    num_turns: int = 0
    """Of the request's turns, those that are in `messages`."""
    task: asyncio.Task[None] | None = None


class Conversations:
    """The conversations of one rollout loop."""

    def __init__(self, codec: TextCodec | None, user_calls: UserCalls) -> None:
        self._codec, self._user_calls = codec, user_calls
        self._loop: RolloutLoop | None = None
        self._of_group: dict[int, tuple[EnvironmentCalls, Prompt]] = {}
        self._open: dict[int, _Open] = {}  # by request
        self._is_closed = False

    def attach(self, loop: RolloutLoop) -> None:
        """Answer to this loop from now on."""
        self._loop = loop

    def begin(self, group: int, calls: EnvironmentCalls, prompt: Prompt) -> None:
        """The requests of this group talk to this environment."""
        self._of_group[group] = (calls, prompt)

    def forget(self, group: int) -> None:
        """All requests of this group have ended."""
        self._of_group.pop(group, None)

    def on_turn(self, request: Request) -> None:
        """A turn has ended: call the environment."""
        one = self._open.get(request.id)
        if one is None:
            calls, prompt = self._of_group[request.group.id]
            one = self._open[request.id] = _Open(calls, _messages_of(prompt))
        one.task = asyncio.create_task(self._ask(request, one))

    def ended(self, request: Request) -> None:
        """A request has ended: its environment is not waited for, and may forget it."""
        one = self._open.pop(request.id, None)
        if one is None:
            return
        if one.task is not None and one.task is not asyncio.current_task():
            one.task.cancel()
        if isinstance(one.calls.environment, ClosesConversations):
            try:
                one.calls.environment.close((request.group.family, request.index))
            except (Exception, SystemExit):
                log.exception("environment %s could not close a conversation", one.calls.name)

    async def close(self) -> None:
        """Stop waiting for environments. Calls that still run are those of `UserCalls` to end."""
        self._is_closed = True
        tasks = [one.task for one in self._open.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, request: Request, one: _Open) -> None:
        """One call, and a second one if its answer does not fit: the response ends, and needs its reward."""
        loop = self._loop
        assert loop is not None, "turns end after attach"
        try:
            answer = await self._call(request, one)
            ids = self._tokens(request, one, answer) if isinstance(answer, Reply) else []
            if len(ids) > loop.buffer.room_tokens(request):
                loop.buffer.run_out(request)
                answer = await self._call(request, one)
            if request.state is not RequestState.AT_TOOL:
                return  # it has ended, and the environment ignored that
            if isinstance(answer, Reply):
                self._remember(request, one, answer, ids)
                loop.answer(request, ids)
            else:
                loop.conclude(request, answer.reward)
        except (Exception, asyncio.CancelledError) as error:  # the user's code may raise anything; the run goes on
            if self._is_closed or request.state is not RequestState.AT_TOOL:
                raise
            loop.fail_at_tool(request, reason(_who(request, one), error))

    async def _call(self, request: Request, one: _Open) -> Reply | End:
        conversation = self._conversation(request, one)
        answer = await self._user_calls.answer(
            _who(request, one), lambda: one.calls.environment(conversation), deadline_s=one.calls.deadline_s
        )
        found = settled(answer)
        is_full = conversation.finish_reason is FinishReason.LENGTH
        return End() if is_full and isinstance(found, Reply) else found

    def _conversation(self, request: Request, one: _Open) -> Conversation:
        assert request.turn_reason is not None, f"{request} was not handed over"
        assert self._loop is not None, "turns end after attach"
        ids = [token for span in request.spans for token in span.ids]
        for turn in request.turns[one.num_turns : -1]:  # those of an interrupted run
            one.messages.append(self._as_message(turn, ids))
            one.num_turns += 1
        newest = self._as_message(request.turns[-1], ids)
        return Conversation(
            group=request.group.family,
            prompt_id=request.group.prompt_id,
            index=request.index,
            seed=request.seed,
            turn=request.num_turns,
            prompt_token_ids=request.group.prompt or (),
            token_ids=ids,
            turns=tuple(request.turns),
            messages=(*one.messages, newest),
            text=newest["content"],
            finish_reason=request.turn_reason,
            room_tokens=self._loop.buffer.room_tokens(request),
        )

    def _as_message(self, turn: Turn, token_ids: Sequence[int]) -> Message:
        role = "assistant" if turn.kind == "generated" else "tool"
        text = self._codec.decode(token_ids[turn.start : turn.end]) if self._codec is not None else ""
        return {"role": role, "content": text}

    def _tokens(self, request: Request, one: _Open, reply: Reply) -> list[int]:
        if reply.token_ids:
            return checked_tokens(reply.token_ids, one.calls.vocab_size)
        last_token = request.spans[-1].ids[-1]
        return given_tokens(self._codec, one.messages, reply.messages, last_token=last_token, tools=one.calls.tools)

    def _remember(self, request: Request, one: _Open, reply: Reply, ids: Sequence[int]) -> None:
        """Note the newest turn and its answer as messages; tokens are noted as their text."""
        all_ids = [token for span in request.spans for token in span.ids]
        one.messages.append(self._as_message(request.turns[-1], all_ids))
        text = self._codec.decode(ids) if self._codec is not None else ""
        one.messages.extend(reply.messages or [{"role": "tool", "content": text}])
        one.num_turns = len(request.turns) + 1


def _who(request: Request, one: _Open) -> str:
    return f"environment {one.calls.name}, turn {request.num_turns}"


def _messages_of(prompt: Prompt) -> list[Message]:
    if prompt.messages is not None:
        return list(prompt.messages)
    return [] if prompt.text is None else [{"role": "user", "content": prompt.text}]
