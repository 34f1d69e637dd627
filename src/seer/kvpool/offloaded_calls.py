# SPDX-License-Identifier: Apache-2.0
"""The awaitable calls of a pool whose blocking ones do the work: each runs its `_now` twin in the pool's threads."""

from __future__ import annotations

from abc import ABC, abstractmethod

from seer.kvpool.base import Buffers, Owners
from seer.kvpool.keys import Keys
from seer.kvpool.offload import Offload


class OffloadedCalls(ABC):
    """Base of such pools; they make `_offload` before the first call."""

    _offload: Offload

    async def lookup(self, keys: Keys) -> int:
        """Count the leading keys that are held."""
        return await self._offload.run(self.lookup_now, keys)

    async def put(self, keys: Keys, buffers: Buffers, owners: Owners = None) -> list[bool]:
        """Store one block per key, True where it is held."""
        return await self._offload.run(self.put_now, keys, buffers, owners)

    async def get(self, keys: Keys, buffers: Buffers) -> list[bool]:
        """Fill one buffer per key, False where it is a miss."""
        return await self._offload.run(self.get_now, keys, buffers)

    @abstractmethod
    def lookup_now(self, keys: Keys) -> int:
        """Count the leading keys that are held."""

    @abstractmethod
    def put_now(self, keys: Keys, buffers: Buffers, owners: Owners = None) -> list[bool]:
        """Store one block per key, True where it is held."""

    @abstractmethod
    def get_now(self, keys: Keys, buffers: Buffers) -> list[bool]:
        """Fill one buffer per key, False where it is a miss."""
