# SPDX-License-Identifier: Apache-2.0
"""Keep the last block of a chunk that leaves, though it is not full, and go on in it when the request comes back.

A turn ends anywhere in a block. The computed part is registered under a key of its own (`seer.kvpool.keys.part_key`),
in the cache of the instance and in the pool. The next chunk knows how far the KV of its request had been computed:
to the token before its newest one, given tokens not counted. So there is one key to look for.

Invariants
  1. A chunk writes only to blocks without a key: the key of a part is dropped when a chunk goes on in it.
  2. What a part block holds after its part is never read before it is computed.
  3. The pool holds at most one part of a request: it is freed when the request goes on.
  4. After a wait nothing of a context is computed again but its newest token, unless instance and pool dropped blocks.
"""

from __future__ import annotations

from seer.engine.local.active import ActiveChunk, Part
from seer.engine.local.blocks import BlockTable
from seer.engine.local.cache import KVCache
from seer.kvpool.base import Pool, part_owner
from seer.kvpool.keys import Namespace, part_key


def known_part(active: ActiveChunk, namespace: Namespace) -> Part | None:
    """What earlier chunks of this request have left; None if the request is new, or they ended with a full block."""
    chunk = active.chunk
    if not chunk.num_generated_tokens:
        return None
    return _part(active, namespace, chunk.num_context_tokens - chunk.num_fresh_tokens - 1)


def keep_part(active: ActiveChunk, namespace: Namespace, cache: KVCache, blocks: BlockTable, pool: Pool | None) -> None:
    """Register what this chunk, which is about to leave, has computed of its last block."""
    part = _part(active, namespace, active.num_computed) if active.decoding and active.seq_slot >= 0 else None
    if part is not None:
        block = active.blocks[part.index]
        blocks.seal(block, part.key)
        if pool is not None:
            cache.export(pool, [part.key], [block], [part_owner(str(active.chunk.request))])


def _part(active: ActiveChunk, namespace: Namespace, num_tokens: int) -> Part | None:
    size = active.chain.block_size
    index = num_tokens // size
    if num_tokens % size == 0:
        return None
    return Part(index, num_tokens, part_key(namespace, active.keys[:index], active.tokens[index * size : num_tokens]))
