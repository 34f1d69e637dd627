# SPDX-License-Identifier: Apache-2.0
"""A sink for an instance's outputs that can be waited on; each contract suite adds how it reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
