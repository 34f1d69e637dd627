# SPDX-License-Identifier: Apache-2.0
"""A sink for an instance's outputs that can be waited on, and how a scenario is played with it.

Each contract suite adds how it reads the outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from seer.engine.base import Instance
from seer.types import ChunkOutput

DEADLINE_S = 60.0


class OutputInbox:
    """Keeps every output; every wait has a deadline."""

    def __init__(self) -> None:
        self.outputs: list[ChunkOutput] = []
        self._news = asyncio.Event()

    def __call__(self, output: ChunkOutput) -> None:
        self.outputs.append(output)
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                self._news.clear()
                await self._news.wait()

    async def ends(self, *requests: int) -> None:
        await self.until(lambda: set(requests) <= {o.request for o in self.outputs if o.end})


AnyInbox = TypeVar("AnyInbox", bound=OutputInbox)


async def play_on(
    make: Callable[[], Instance], inbox: AnyInbox, scenario: Callable[[Instance, AnyInbox], Awaitable[None]]
) -> None:
    """Play a scenario on a fresh instance, and close it however that ends."""
    instance = make()
    await instance.start(inbox)
    try:
        await scenario(instance, inbox)
    finally:
        await instance.close()
