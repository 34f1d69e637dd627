# SPDX-License-Identifier: Apache-2.0
"""Keep the KV of a chunk that must wait because the instance is out of blocks, and bring it back.

Blocks that the pool took are loaded from there again. All others, with the last one that is not full, are copied to
host memory. So nothing is computed twice for lack of memory.

Invariants
  1. After `restore` the chunk has the KV of as many tokens as before `save`, unless the pool has dropped some.
  2. A saved copy is used once.
"""

from __future__ import annotations

from seer.engine.local.active import ActiveChunk, SavedBlocks
from seer.engine.local.blocks import BlockTable
from seer.engine.local.cache import KVCache


def save(active: ActiveChunk, cache: KVCache) -> None:
    """Copy the computed blocks that the pool does not have."""
    num_used = -(-active.num_computed // cache.block_size)
    first = min(active.num_pooled, num_used)
    active.saved = SavedBlocks(first, active.num_computed, cache.read(active.blocks[first:num_used]))


def restore(active: ActiveChunk, cache: KVCache, blocks: BlockTable) -> None:
    """Write the copy to the blocks that the chunk has now, after those that were found or loaded."""
    saved, active.saved = active.saved, None
    assert saved is not None, f"request {active.chunk.request} was not parked"
    start = active.num_sealed
    if start < saved.first or active.num_computed >= saved.num_computed:
        return  # the pool has lost blocks before the copy, or nothing is missing
    rows = saved.rows[start - saved.first :]
    cache.write(active.blocks[start : start + len(rows)], rows)
    active.num_computed = saved.num_computed
    for index in range(start, saved.num_computed // cache.block_size):
        blocks.seal(active.blocks[index], active.keys[index])
        active.num_sealed = index + 1
