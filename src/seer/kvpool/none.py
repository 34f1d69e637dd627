# SPDX-License-Identifier: Apache-2.0
"""A pool that holds nothing: the smallest implementation of the protocol.

Tests run engines with it, to take the code path with a pool and still compute everything, and build pools of their own
on it. An instance whose pool cannot be opened has a `LostPool`. A run with `--pool none` does not use it: its instances
have no pool at all.

Invariants
  1. No call changes anything but the counters.
  2. `put` reports False and `get` a miss, for every block.
  3. Wrong use raises as with any pool: keys of another size, or buffers that do not match the keys.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from seer.kvpool.base import Buffers, Owners, PoolStats, PoolTroubles
from seer.kvpool.keys import Keys, as_key_array


class NonePool:
    """Holds nothing."""

    name = "none"

    def __init__(self) -> None:
        self._num_refused = 0
        self._num_miss = 0

    async def lookup(self, keys: Keys) -> int:
        """Always 0."""
        return self.lookup_now(keys)

    async def put(self, keys: Keys, buffers: Buffers, owners: Owners = None) -> list[bool]:
        """Refuse every block."""
        return self.put_now(keys, buffers, owners)

    async def get(self, keys: Keys, buffers: Buffers) -> list[bool]:
        """Miss every block."""
        return self.get_now(keys, buffers)

    def lookup_now(self, keys: Keys) -> int:
        """Always 0."""
        as_key_array(keys)
        return 0

    def put_now(self, keys: Keys, buffers: Buffers, owners: Owners = None) -> list[bool]:
        """Refuse every block."""
        num = _num_blocks(keys, buffers)
        self._num_refused += num
        return [False] * num

    def get_now(self, keys: Keys, buffers: Buffers) -> list[bool]:
        """Miss every block."""
        num = _num_blocks(keys, buffers)
        self._num_miss += num
        return [False] * num

    def pin(self, request_id: str, keys: Keys) -> int:
        """Nothing is held, so nothing is pinned."""
        return 0

    def release(self, request_id: str) -> int:
        """No request has a pin."""
        return 0

    def free(self, request_id: str) -> int:
        """No request has a block."""
        return 0

    def prefetch(self, keys: Keys) -> None:
        """Nothing is on SSD."""

    def drop_weights_version(self, weights_version: int) -> int:
        """Nothing to drop."""
        return 0

    def stats(self) -> PoolStats:
        """The blocks refused and missed."""
        return PoolStats(backend=self.name, num_refused=self._num_refused, num_miss=self._num_miss)

    def troubles(self) -> PoolTroubles:
        """Nothing fails."""
        return PoolTroubles()

    def close(self) -> None:
        """Nothing to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LostPool(NonePool):
    """Stands for a pool that cannot be opened: each block that it refuses or misses counts as a failure."""

    name = "lost"

    def stats(self) -> PoolStats:
        """The blocks refused and missed, as failures."""
        return PoolStats(backend=self.name, num_failed=self._num_refused + self._num_miss)

    def troubles(self) -> PoolTroubles:
        """The same."""
        return PoolTroubles(num_failed=self._num_refused + self._num_miss)


def _num_blocks(keys: Keys, buffers: Buffers) -> int:
    num = len(as_key_array(keys))
    if len(buffers) != num:
        raise ValueError(f"as many buffers as keys are needed: {len(buffers)} for {num}")
    return num
