# SPDX-License-Identifier: Apache-2.0
"""Who may start now: one count of responses in flight, and the states in which new ones wait or are refused.

    serving    requests start at once
    paused     they are taken and wait for `resume` (as vLLM's /pause), also while the weights change
    updating   503 with Retry-After: the weights change
    draining   503: the server ends

Waits for                            unblocked by
  `enter` while paused                 `resume`, draining (which refuses it), its client's leaving, an abort (`wake`)
  `until_idle`                         the last `leave`

Invariants
  1. `num_in_flight` is the number of responses taken and not yet left; it never exceeds the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from seer.serve.refusals import Refusal, bad_request


class Gate:
    """Admission of responses."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self.num_in_flight = 0
        self._num_updates = 0
        self._is_paused = False
        self.is_draining = False
        self._changed = asyncio.Event()

    @property
    def state(self) -> str:
        """As /health shows it."""
        if self.is_draining:
            return "draining"
        if self._is_paused:
            return "paused"
        return "updating" if self._num_updates else "serving"

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait."""
        return self._is_paused

    async def enter(self, num_responses: int, *, gives_up: Callable[[], bool]) -> None:
        """Take responses in, or raise a Refusal; waits while the server is paused, unless its request gives up. Pair it
        with `leave`.
        """
        self._refuse_closed()
        if num_responses > self._max_in_flight:
            raise bad_request(
                f"{num_responses:,} responses in one request, at most {self._max_in_flight:,} may be in flight",
                hint="send fewer prompts or a smaller n, or raise --max-in-flight",
            )
        if self.num_in_flight + num_responses > self._max_in_flight:
            raise Refusal(
                429,
                f"{self.num_in_flight:,} responses are in flight, {num_responses:,} more would exceed "
                f"{self._max_in_flight:,}",
                hint="try again after Retry-After, or raise --max-in-flight",
            )
        self.num_in_flight += num_responses
        try:
            while self._is_paused and not self.is_draining and not gives_up():
                await self._wait()
            if not gives_up():
                self._refuse_closed()
        except BaseException:
            self.leave(num_responses)
            raise

    def leave(self, num_responses: int = 1) -> None:
        """Responses have ended."""
        self.num_in_flight -= num_responses
        assert self.num_in_flight >= 0, "more responses left than entered"
        if not self.num_in_flight:
            self._notify()

    def pause(self) -> None:
        """New requests wait from now on."""
        self._is_paused = True

    def resume(self) -> None:
        """Requests start again."""
        self._is_paused = False
        self._notify()

    def wake(self) -> None:
        """Let what waits look again whether it gives up."""
        self._notify()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Refuse new requests while the weights change."""
        self._num_updates += 1
        try:
            yield
        finally:
            self._num_updates -= 1

    def drain(self) -> None:
        """Refuse new requests for good."""
        self.is_draining = True
        self._notify()

    async def until_idle(self) -> None:
        """Wait until nothing is in flight."""
        while self.num_in_flight:
            await self._wait()

    def _refuse_closed(self) -> None:
        if self.is_draining:
            raise Refusal(503, "the server ends and takes no new requests")
        if self._num_updates and not self._is_paused:
            raise Refusal(503, "the weights are being updated", hint="try again after Retry-After")

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
