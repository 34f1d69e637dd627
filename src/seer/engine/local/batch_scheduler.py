# SPDX-License-Identifier: Apache-2.0
"""Decide what the next step computes: which chunks enter, which decode, which prefill.

A chunk takes KV blocks as it grows. It enters when a sequence slot is free and there are blocks for its context, with
some left for the growth of all (`HEADROOM_BLOCKS`). When none is left, the chunk that entered last is parked
(parking.py): its KV is kept, and it waits at the head of the queue. Under leases whose memory the driver counts this
does not happen. Chunks enter in order of arrival. A step holds the chunks that decode first, then pieces of contexts,
up to `max_step_tokens` batched tokens.

Invariants
  1. The blocks of a running chunk cover its tokens and the next one. The first of the running chunks is never parked,
     so each step makes progress.
  2. Two chunks never compute the same block in one step: the later one waits and then finds the block. The earliest
     chunk never waits, so every step with running chunks makes progress.
  3. The same arrivals, pool contents and drafts give the same plans.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from seer.drafting.base import Allowance, DraftAsk, DraftBudget, Drafter, RunningBatch
from seer.engine.local.active import ActiveChunk
from seer.engine.local.batch import Work
from seer.engine.local.blocks import BlockTable
from seer.engine.local.cache import KVCache
from seer.engine.local.parking import restore, save
from seer.errors import DraftError
from seer.kvpool.base import Pool, part_owner
from seer.kvpool.node_pool import NO_FAR_READS, FarReads, take_far_reads

HEADROOM_BLOCKS = 4
"""Blocks to be free for each running chunk, as far as its lease goes, when another one enters. Fewer would let chunks
enter that are parked a few steps later."""
AHEAD_TOKENS = 48
"""Tokens for which a chunk takes blocks before it has them: more than a burst of steps generates, with few drafts."""
NO_ALLOWANCE = Allowance(0)
"""Draft nothing."""
DEFAULT_ALLOWANCE = Allowance(4)
"""Where no budget is given: short drafts, which cost little when they are rejected."""


@dataclass(slots=True)
class Loads:
    """Loads from the pool since the last `take_loads`."""

    seconds: float = 0.0
    num_bytes: int = 0
    far: FarReads = NO_FAR_READS
    """Of these, from other nodes."""
    num_missed_tokens: int = 0
    """Tokens of continued requests whose KV the pool no longer had. They are computed again."""


class BatchScheduler:
    """Owner of the waiting and running chunks and of their blocks."""

    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_step_tokens: int,
        pool: Pool | None = None,
        drafter: Drafter | None = None,
        budget: DraftBudget | None = None,
    ) -> None:
        self.cache = cache
        self.blocks = BlockTable(cache.num_blocks)
        self.waiting: deque[ActiveChunk] = deque()
        self.running: list[ActiveChunk] = []
        self.max_num_seqs = max_num_seqs
        self.max_step_tokens = max_step_tokens
        self.pool = pool
        self.drafter = drafter
        self.budget = budget
        self.loads = Loads()
        self.num_draft_failures = 0
        self.num_parked = 0
        """Times that a running chunk was parked here because no block was left."""
        self.tables_version = 0
        """Counts changes of `tables`. A runner that keeps a copy compares it."""
        width = -(-max_model_len // cache.block_size)
        self.tables = torch.zeros((max_num_seqs, width), dtype=torch.int32)
        self._seq_slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, active: ActiveChunk) -> None:
        """Append a chunk to the queue."""
        self.waiting.append(active)

    def all_chunks(self) -> Iterator[ActiveChunk]:
        """Running chunks, then waiting ones."""
        yield from self.running
        yield from self.waiting

    def plan(self) -> list[Work]:
        """Let waiting chunks enter while they fit. Return one work per decoding chunk, without drafts."""
        self._grow()
        while self.waiting and self._enter(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        return [Work(active, 1) for active in self.running if active.decoding]

    def leave(self, active: ActiveChunk) -> None:
        """Remove a running or waiting chunk. Its sealed blocks stay in the cache."""
        if active.seq_slot >= 0:
            self.running.remove(active)
            self._seq_slots.append(active.seq_slot)
            self._seq_slots.sort(reverse=True)
            active.seq_slot = -1
            self.blocks.release(active.blocks)
            active.blocks = []
        else:
            self.waiting.remove(active)

    def _write_table(self, active: ActiveChunk, start: int, blocks: Sequence[int]) -> None:
        row = torch.tensor(blocks, dtype=torch.int32)
        self.tables[active.seq_slot, start : start + len(blocks)] = row
        self.tables_version += 1

    # Entering

    def _enter(self, active: ActiveChunk) -> bool:
        """Take a sequence slot and the blocks of its tokens; reuse KV of this instance, then of the pool."""
        tokens = self.cache.block_size
        found = self.blocks.find(active.keys[: self._max_reused(active)])
        num_full = len(found)
        if active.part is not None and active.part.index == num_full:
            found += self.blocks.find([active.part.key])
        needed = self._num_blocks(len(active.tokens) + 1) - len(found)
        self.blocks.hold(found)
        if not self._seq_slots or needed + self._headroom(active) > self.blocks.num_available:
            self.blocks.release(found)
            return False
        active.blocks = found + self.blocks.take(needed)
        active.num_entered, active.num_sealed = len(active.tokens), num_full
        active.num_computed = active.num_found = num_full * tokens
        if active.part is not None and len(found) > num_full:
            self.blocks.unseal(found[-1])
            active.num_computed = active.num_found = active.part.num_tokens
        if self.pool is not None and (active.chunk.load_kv or active.saved is not None):
            self._fetch(active, self.pool)
        if self.pool is not None and active.part is not None:
            self.pool.free(part_owner(str(active.chunk.request)))
        if active.saved is not None:
            restore(active, self.cache, self.blocks)
        active.num_loaded, active.part = active.num_computed - active.num_found, None
        active.seq_slot = self._seq_slots.pop()
        self._write_table(active, 0, active.blocks)
        return True

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.block_size)

    def _headroom(self, entering: ActiveChunk) -> int:
        """Blocks to be left for the next tokens of all running chunks and of the one that enters."""
        lacking = self._num_blocks(entering.end_tokens) - self._num_blocks(len(entering.tokens) + 1)
        total = min(HEADROOM_BLOCKS, lacking)
        for active in self.running:
            total += max(0, min(HEADROOM_BLOCKS, self._num_blocks(active.end_tokens) - len(active.blocks)))
        return total

    def _grow(self) -> None:
        """Take blocks for the next tokens of each decoding chunk; park the last chunks while none is left."""
        for active in list(self.running):
            if active.seq_slot < 0:
                continue  # parked for one before it
            held = len(active.blocks)
            needed = self._num_blocks(len(active.tokens) + 1) - held
            while needed > self.blocks.num_available and active.seq_slot >= 0:
                self._park(self.running[-1])
            if active.seq_slot < 0:
                continue
            wanted = self._num_blocks(min(active.end_tokens, len(active.tokens) + AHEAD_TOKENS)) - held
            count = max(needed, min(wanted, self.blocks.num_available))
            if count > 0:
                fresh = self.blocks.take(count)
                active.blocks += fresh
                self._write_table(active, held, fresh)

    def _park(self, active: ActiveChunk) -> None:
        """Let a running chunk wait at the head of the queue, with its KV kept."""
        assert len(self.running) > 1, f"request {active.chunk.request} alone needs more KV blocks than there are"
        save(active, self.cache)
        self.leave(active)
        self.waiting.appendleft(active)
        self.num_parked += 1

    def _fetch(self, active: ActiveChunk, pool: Pool) -> None:
        """Fill the next blocks from the pool, up to the first one that it lacks."""
        start = active.num_sealed
        if active.num_computed > start * self.cache.block_size:
            return  # its last part was found here
        began_s = time.perf_counter()
        keys = self._pooled_keys(active, pool)
        blocks = active.blocks[start : start + len(keys)]
        num_fetched = self.cache.fetch(pool, keys, blocks) if keys else 0
        part = active.part if active.part is not None and active.part.key in keys[:num_fetched] else None
        num_full = num_fetched if part is None else num_fetched - 1
        for index in range(num_full):
            self.blocks.seal(blocks[index], keys[index])
        active.num_sealed += num_full
        active.num_computed = active.num_sealed * self.cache.block_size if part is None else part.num_tokens
        self.loads.seconds += time.perf_counter() - began_s
        self.loads.num_bytes += num_fetched * self.cache.block_bytes
        if active.num_response:
            # Blocks with tokens that were given since have never been computed.
            num_known = (len(active.tokens) - 1 - active.chunk.num_fresh_tokens) // self.cache.block_size
            self.loads.num_missed_tokens += max(0, num_known - start - num_full) * self.cache.block_size

    def _pooled_keys(self, active: ActiveChunk, pool: Pool) -> list[bytes]:
        """Keys of the next blocks, as far as the pool has them; the last one may be that of a part."""
        start = active.num_sealed
        keys = active.keys[start : self._max_reused(active)]
        keys = keys[: pool.lookup_now(keys)] if keys else keys
        if active.part is not None and active.part.index == start + len(keys) and pool.lookup_now([active.part.key]):
            keys = [*keys, active.part.key]
        return keys

    def take_loads(self) -> Loads:
        """Loads from the pool since the last call."""
        loads, self.loads = self.loads, Loads()
        if loads.num_bytes and self.pool is not None:
            loads.far = take_far_reads(self.pool)
        return loads

    def _max_reused(self, active: ActiveChunk) -> int:
        """Blocks that may be reused. The last token is always computed, because its successor is sampled from it."""
        return (len(active.tokens) - 1) // self.cache.block_size

    # Continuing

    def allow(self, works: Sequence[Work]) -> Allowance:
        """Draft tokens allowed per chunk: the budget's, cut to the room in the step."""
        if self.drafter is None or not works:
            return NO_ALLOWANCE
        num_probes = sum(work.active.chunk.is_probe for work in works)
        batch = RunningBatch(len(works), num_probes, is_refilled=bool(self.waiting))
        allowance = self.budget(batch) if self.budget else DEFAULT_ALLOWANCE
        return allowance.cut(max(0, (self.max_step_tokens - len(works)) // len(works)))

    def draft(self, works: Sequence[Work], allowance: Allowance) -> None:
        """Ask the drafter for one tree per chunk."""
        if self.drafter is None or allowance.most < 1:
            return
        try:
            trees = self.drafter.draft(draft_asks(works, allowance))
        except DraftError:
            self.num_draft_failures += 1
            return
        for work, tree in zip(works, trees, strict=True):
            # The root's own sample is one of the remaining tokens; the tree may add the others.
            most = allowance.tokens_for(work.active.chunk.is_probe)
            kept = tree.pruned(most, work.active.num_room - 1)
            work.tree = kept if kept.tokens else None

    # Prefilling

    def add_contexts(self, works: list[Work]) -> None:
        """Append pieces of contexts until the step is full."""
        room = self.max_step_tokens - sum(work.num_batched_tokens for work in works)
        being_computed: set[bytes] = set()
        for active in self.running:
            if active.decoding or room <= 0:
                continue
            self._adopt(active)
            start = active.num_computed // self.cache.block_size
            if start < len(active.keys) and active.keys[start] in being_computed:
                continue
            being_computed.update(active.keys[start:])
            count = min(room, len(active.tokens) - active.num_computed)
            works.append(Work(active, count))
            room -= count

    def _adopt(self, active: ActiveChunk) -> None:
        """Replace reserved blocks by equal ones that another chunk has computed since this one entered."""
        tokens = self.cache.block_size
        if active.num_computed % tokens:
            return
        start = active.num_computed // tokens
        found = self.blocks.find(active.keys[start : self._max_reused(active)])
        if not found:
            return
        self.blocks.hold(found)
        self.blocks.release(active.blocks[start : start + len(found)])
        active.blocks[start : start + len(found)] = found
        self._write_table(active, start, found)
        active.num_sealed = start + len(found)
        active.num_computed = active.num_sealed * tokens


def draft_asks(works: Sequence[Work], allowance: Allowance) -> list[DraftAsk]:
    """The drafter's input for these chunks."""
    return [
        DraftAsk(
            active.chunk.group,
            active.chunk.request,
            active.tokens,
            active.chunk.num_prompt_tokens,
            min(allowance.tokens_for(active.chunk.is_probe), active.num_room - 1),
            allowance.max_paths,
        )
        for active in (work.active for work in works)
    ]
