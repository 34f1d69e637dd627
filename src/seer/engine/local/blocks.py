# SPDX-License-Identifier: Apache-2.0
"""Which chunks hold which KV block, and which blocks can be found again by their content.

Bookkeeping only: the bytes are in cache.py. A block is in exactly one of three states:

    held      at least one active chunk refers to it
    cached    no chunk refers to it, it is registered under a key, and it is kept until its room is needed
    free      no chunk refers to it and its content is meaningless

Invariants (checked by `check_integrity`)
  1. held + cached + free is every block; reference counts are the numbers of holders.
  2. A key names at most one block, and only a sealed block: final, computed, and full but for parts (part_blocks.py).
  3. `take` reuses free blocks first and then the least recently used cached block; a held block is never
     reused.
  4. After `forget_all` no key is found.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockTable:
    """The blocks of one instance."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_available(self) -> int:
        """Blocks that `take` could give out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that no chunk holds and that are kept for reuse."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that at least one active chunk refers to."""
        return self.num_blocks - self.num_available

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest leading run of keys that are registered; nothing changes."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block, found by its key a moment ago."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """Give out blocks of meaningless content; the caller has checked `num_available`."""
        assert count <= self.num_available, f"{count} blocks asked, {self.num_available} available"
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            taken.append(block)
        return taken

    def seal(self, block: int, key: bytes) -> None:
        """Register a held block that is full, final and computed. A second block of equal content gets no key."""
        assert self._references[block] > 0, f"block {block} is sealed but no chunk holds it"
        if key not in self._block_of:
            assert self._key_of[block] is None, f"block {block} is sealed twice"
            self._key_of[block] = key
            self._block_of[key] = block

    def unseal(self, block: int) -> None:
        """Drop the key of a block that one chunk alone holds, so that the chunk may write to it."""
        assert self._references[block] == 1, f"block {block} has {self._references[block]} holders"
        key = self._key_of[block]
        assert key is not None, f"block {block} has no key"
        del self._block_of[key]
        self._key_of[block] = None

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block. The last blocks of a sequence are evicted first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} released more often than held"
            if self._references[block] == 0:
                if self._key_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def forget_all(self) -> None:
        """Remove all keys, because the weights changed. Held blocks stay held."""
        for block in self._block_of.values():
            self._key_of[block] = None
        self._block_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._key_of[block]
        assert key is not None, f"cached block {block} has no key"
        del self._block_of[key]
        self._key_of[block] = None
        return block

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Check the invariants against the blocks that chunks say they hold."""
        held = Counter(block for blocks in holders for block in blocks)
        for block, references in enumerate(self._references):
            assert references == held[block], f"block {block}: {references} references, {held[block]} holders"
        unheld = {block for block in range(self.num_blocks) if not held[block]}
        kept = [*self._free, *self._cached]
        assert sorted(kept) == sorted(unheld), f"free and cached {sorted(kept)}, unheld {sorted(unheld)}"
        for key, block in self._block_of.items():
            assert self._key_of[block] == key, f"block {block} is found under a key it does not carry"
        for block in self._cached:
            assert self._key_of[block] is not None, f"cached block {block} has no key"
        for block in self._free:
            assert self._key_of[block] is None, f"free block {block} has a key"
