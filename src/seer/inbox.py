# SPDX-License-Identifier: Apache-2.0
"""Outputs of instances on their way to the rollout loop, and the loop's wait for them.

An output that ends a chunk is due at once: its slot is free. One that only brings tokens may wait `gather_s` for
others, so that a round of the loop's decisions has more of them.

Invariants
  1. Every output is taken once, in the order in which it came.
  2. An output is due at most `gather_s` after it has come.
  3. Whoever waits goes on once an output is due or `wake` was called, or ends at the deadline.

Waits for                                    unblocked by
  a due output (`wait`)                        `put`, the end of `gather_s`, `wake`, the deadline
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from seer.errors import DeadlineExceeded
from seer.types import ChunkOutput


class Inbox:
    """What has come and was not taken yet."""

    def __init__(self, gather_s: float = 0.0) -> None:
        self._gather_s = gather_s
        self._outputs: list[ChunkOutput] = []
        self._gathering: asyncio.TimerHandle | None = None
        self._are_due = False
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._outputs)

    def put(self, output: ChunkOutput) -> None:
        """An output has come."""
        self._outputs.append(output)
        if output.end is not None or not self._gather_s:
            if not self._are_due:
                self._become_due()
        elif self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(self._gather_s, self._become_due)

    def wake(self) -> None:
        """There is something else to look at."""
        self._wake.set()

    async def wait(self, deadline_s: float | None, cause: Callable[[], str]) -> None:
        """Until outputs are due, or `wake` is called; None waits for ever. `cause` says what was waited for."""
        if self._are_due:
            return
        self._wake.clear()
        if deadline_s is None:
            await self._wake.wait()
            return
        try:
            # Not `wait_for`: on Python 3.11 it can swallow a cancellation that arrives with the wake-up.
            async with asyncio.timeout(deadline_s):
                await self._wake.wait()
        except TimeoutError:
            raise DeadlineExceeded(cause(), deadline_s) from None

    def take(self) -> list[ChunkOutput]:
        """All that has come, due or not."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        self._are_due = False
        outputs, self._outputs = self._outputs, []
        return outputs

    def _become_due(self) -> None:
        self._are_due = True
        self._wake.set()
