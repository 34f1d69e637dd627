# SPDX-License-Identifier: Apache-2.0
"""The responses of one HTTP request, from submission to their end.

Invariants
  1. Every submitted response leaves the gate once, when its handle is done.
  2. Leaving a generation early cancels what has not ended.
  3. One that is cancelled while it waits to start ends without a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from seer.runs.prompts import BadPrompts
from seer.runs.response_handle import ResponseHandle
from seer.serve.backend import Backend
from seer.serve.choice import Ask, Choice
from seer.serve.gate import Gate
from seer.serve.refusals import Refusal, bad_request, refusal_of
from seer.types import Response, TokenSpan


class Generation:
    """The responses of one request; an async context manager around submission and end."""

    def __init__(
        self,
        backend: Backend,
        gate: Gate,
        asks: Sequence[Ask],
        *,
        streams: bool,
        needs_text: bool,
        running: set[Generation],
    ) -> None:
        self._backend = backend
        self._gate = gate
        self._asks = asks
        self._streams = streams
        self._needs_text = needs_text
        self._running = running
        self._num_left = 0
        self._has_started = False
        self._is_aborted = False
        """Before it started."""
        self.choices: list[Choice] = []
        self._handles: list[ResponseHandle] = []
        self._news = asyncio.Event()
        self.failure: Refusal | None = None
        self.name: str | None = None
        """By which its client may abort it."""

    @property
    def has_started(self) -> bool:
        """Whether it is past the gate; before that it may wait for `resume`."""
        return self._has_started

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(ask.token_ids) for ask in self._asks)

    @property
    def num_tokens(self) -> int:
        """Generated so far."""
        return sum(len(choice.ids) for choice in self.choices)

    async def start(self) -> None:
        """Submit everything; a Refusal or an error of the session leaves nothing behind. Pair it with `cancel`."""
        num = self._num_asked
        self._running.add(self)
        try:
            await self._gate.enter(num, gives_up=lambda: self._is_aborted)
        except BaseException:
            self._discard_ended()
            raise
        self._has_started = True
        if self._is_aborted:
            self._end_without_tokens()
            return
        try:
            for number, ask in enumerate(self._asks):
                try:
                    self._submit(ask)
                except BadPrompts as error:  # the session was given one prompt, the request may have more
                    raise bad_request(f"prompt {number}: {error.bad[0].why}", param="prompt") from None
        except BaseException:
            self._gate.leave(num - len(self._handles))
            self._discard_ended()
            self.cancel()
            raise

    async def __aenter__(self) -> Self:
        """`start`."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what has not ended; it leaves the gate when it has."""
        self.cancel()

    def cancel(self) -> int:
        """End every response soon; returns how many had not ended."""
        if not self._has_started:
            num = 0 if self._is_aborted else self._num_asked
            self._is_aborted = True
            self._gate.wake()
            return num
        left = [handle for handle in self._handles if not handle.done()]
        for handle in left:
            handle.cancel()
        return len(left)

    async def finished(self) -> None:
        """Wait until every response has ended; raises the Refusal of one that failed."""
        while self._num_left:
            await self._news.wait()
            self._news.clear()
        if self.failure is not None:
            raise self.failure

    async def news(self) -> AsyncIterator[Choice]:
        """Choices that have something new, until all have ended; raises the Refusal of one that failed."""
        while not all(choice.is_end_sent for choice in self.choices):
            await self._news.wait()
            self._news.clear()
            if self.failure is not None:
                raise self.failure
            for choice in self.choices:
                if choice.has_news:
                    yield choice

    @property
    def _num_asked(self) -> int:
        return sum(ask.n for ask in self._asks)

    def _make_choices(self, ask: Ask) -> list[Choice]:
        first, codec = len(self.choices), self._backend.codec
        return [Choice(first + i, ask, codec, has_text=self._needs_text) for i in range(ask.n)]

    def _end_without_tokens(self) -> None:
        for ask in self._asks:
            self.choices += self._make_choices(ask)
        for choice in self.choices:
            choice.abort()
        self._gate.leave(self._num_asked)
        self._discard_ended()
        self._news.set()

    def _submit(self, ask: Ask) -> None:
        made = self._make_choices(ask)
        by_handle: dict[int, Choice] = {}

        def on_tokens(handle: ResponseHandle, span: TokenSpan) -> None:
            by_handle[id(handle)].add(span, ends_with_stop_token=handle.stop_token is not None)
            self._news.set()

        handles = self._backend.session.submit(
            ask.token_ids,
            n=ask.n,
            sampling=ask.sampling,
            seed=ask.seed,
            group=ask.group,
            on_tokens=on_tokens if self._streams else None,
        )
        by_handle.update(zip(map(id, handles), made, strict=True))
        self.choices += made
        self._handles += handles
        self._num_left += len(handles)
        for handle, choice in zip(handles, made, strict=True):
            handle.on_end(partial(self._on_end, choice))

    def _discard_ended(self) -> None:
        if not self._num_left:
            self._running.discard(self)

    def _on_end(self, choice: Choice, ended: asyncio.Future[Response]) -> None:
        try:
            choice.end(ended.result())
        except Exception as error:  # the session broke: its error answers the request
            choice.error = refusal_of(error)
        self._gate.leave()
        self._num_left -= 1
        self._discard_ended()
        if choice.error is not None and self.failure is None:
            self.failure = choice.error
            self.cancel()
        self._news.set()
