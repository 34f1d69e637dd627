# SPDX-License-Identifier: Apache-2.0
"""Token arena and n-gram table of the groups on one GPU: what a step asks and tells, and who owns which memory.

A *row* is a place in vLLM's request states; a *region* is the arena's memory of one sequence. A request keeps its
region from chunk to chunk, and after its end: its siblings draft from it until its group is freed.

Invariants
  1. Memory is bounded: `arena_tokens` and `table_entries` are taken once. A group is freed when it has ended and none
     of its requests runs. When the arena is full, groups that have no running request are freed, least recently used
     first; if that gives no room, the new sequence is not stored (`num_dropped`), and still drafts from its siblings.
  2. Regions of one arena never overlap, and a freed region is cleared before it is used again. No group is freed while
     tokens of it are being received.
  3. Group numbers are never used twice, so entries of a freed group match no later one.
  4. Nothing here waits for the device.
  5. Only rows of requests that `start` was told of are learned and drafted for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from seer.engine.vllm.gpu_drafts.kernels import clear_kernel, draft_kernel, learn_kernel, power_of_2, receive_kernel
from seer.engine.vllm.gpu_drafts.siblings import Tail

ORDERS = (1, 2, 3, 4, 6, 8)
"""Lengths of contexts that are indexed; on recorded responses longer ones and the ones between add under 1%."""
ARENA_TOKENS = 1 << 24
"""64 MiB: four thousand responses of 4,096 tokens."""
TABLE_ENTRIES = 1 << 25
"""256 MiB. Each stored token makes one entry per order; a full table forgets at random, which costs acceptance only."""
GRAIN_TOKENS = 16
"""Regions begin at multiples of this, so that freed ones fit later sequences."""
MAX_REGIONS = 1 << 15
"""Bounds the arrays of per-region facts (1 MiB)."""
LEARN_BLOCK = 32
"""Tokens that one program of the learning kernel takes at a time: a warp."""


class NewRow(NamedTuple):
    """A sequence that starts running on a row."""

    row: int
    group: Hashable
    request: Hashable
    num_prompt_tokens: int
    max_tokens: int
    """Most tokens the sequence can ever have, its prompt included."""


@dataclass(slots=True)
class _Region:
    number: int
    base: int
    size: int


@dataclass(slots=True)
class _Group:
    number: int
    regions: dict[Hashable, _Region] = field(default_factory=dict)
    num_running: int = 0
    prompt_in: Hashable = None
    """The request whose region has the contexts of the prompt."""
    has_ended: bool = False


class GroupStore:
    """Learns the tokens of running sequences and drafts from those of their groups."""

    def __init__(
        self,
        num_rows: int,
        num_draft_tokens: int,
        device: torch.device,
        *,
        arena_tokens: int = ARENA_TOKENS,
        table_entries: int = TABLE_ENTRIES,
        orders: Sequence[int] = ORDERS,
        max_regions: int = MAX_REGIONS,
    ) -> None:
        assert table_entries & (table_entries - 1) == 0, f"{table_entries} table entries are no power of two"
        self.num_draft_tokens = num_draft_tokens
        self._device = device
        self._contexts = {"MASK": table_entries - 1, "ORDERS": sum(1 << n for n in orders), "MAX_N": max(orders)}
        self._indexing = self._contexts | {"BLOCK": LEARN_BLOCK, "num_warps": 1}
        self._arena = torch.full((arena_tokens,), -1, dtype=torch.int32, device=device)
        self._table = torch.zeros(table_entries, dtype=torch.int64, device=device)
        self._base = torch.zeros(max_regions, dtype=torch.int64, device=device)
        self._size = torch.zeros(max_regions, dtype=torch.int32, device=device)
        self._limit = torch.zeros(max_regions, dtype=torch.int32, device=device)
        self._first = torch.zeros(max_regions, dtype=torch.int32, device=device)
        self._known = torch.zeros(max_regions, dtype=torch.int32, device=device)
        self._group = torch.zeros(max_regions, dtype=torch.int64, device=device)
        self._region_of_row = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        self._group_of_row = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
        self.drafts = torch.zeros(num_rows, num_draft_tokens, dtype=torch.int64, device=device)
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()
        self._running: dict[int, Hashable] = {}
        self._known_rows: set[int] = set()  # rows that the device knows a region or group of
        self._num_groups = 0
        self._free = [(0, arena_tokens)]
        self._free_numbers = list(range(max_regions - 1, -1, -1))
        self.num_dropped = 0
        """Sequences that found no room."""
        self.num_freed_groups = 0
        """Groups that made room for others."""

    def start(self, rows: Iterable[NewRow]) -> None:
        """Sequences begin to run. A request that was here before goes on in its region."""
        placed: list[tuple[int, ...]] = []  # row, region number, group number
        fresh: list[tuple[int, ...]] = []  # region number, base, size, limit, group number, first indexed token
        for one in rows:
            self.finish([one.row])
            group = self._groups.get(one.group)
            if group is None:
                self._num_groups += 1
                group = self._groups[one.group] = _Group(self._num_groups)
            self._groups.move_to_end(one.group)
            group.num_running += 1
            self._running[one.row] = one.group
            region = group.regions.get(one.request)
            size = self._size_for(one.max_tokens)
            if region is not None and region.size < size:
                self._give_back(group.regions.pop(one.request))
                region = None
                if group.prompt_in == one.request:
                    group.prompt_in = None
            if region is None and (region := self._take(size)) is not None:
                if group.prompt_in is None:
                    group.prompt_in = one.request
                # The prompt is the same for all of them.
                first = 0 if group.prompt_in == one.request else one.num_prompt_tokens
                group.regions[one.request] = region
                fresh.append((region.number, region.base, size, one.max_tokens, group.number, first))
            placed.append((one.row, -1 if region is None else region.number, group.number))
            self._known_rows.add(one.row)
        self._open(fresh)
        if placed:
            at, regions, group_numbers = self._to_device(placed)
            self._region_of_row[at] = regions.to(torch.int32)
            self._group_of_row[at] = group_numbers

    def ignore(self, rows: Iterable[int]) -> None:
        """Requests that are not drafted for begin to run on these rows: forget whose they were."""
        forgotten = self._known_rows.intersection(rows)
        if forgotten:
            self.finish(forgotten)
            self._known_rows -= forgotten
            (at,) = self._to_device([(row,) for row in forgotten])
            self._region_of_row[at] = -1
            self._group_of_row[at] = -1

    def receive(self, tails: Sequence[Tail]) -> None:
        """Store and index tokens of siblings that run elsewhere; of groups that are here."""
        kept = {tail.group for tail in tails}
        placed: list[tuple[int, ...]] = []  # region number, start, offset, count
        fresh: list[tuple[int, ...]] = []
        tokens: list[NDArray[np.int32]] = []
        num_tokens = 0
        for tail in tails:
            group = self._groups.get(tail.group)
            if group is None:
                continue
            region = group.regions.get(("elsewhere", tail.stream))
            if region is None:
                region = self._take(self._size_for(tail.max_tokens), kept)
                if region is None:
                    continue
                group.regions["elsewhere", tail.stream] = region
                fresh.append((region.number, region.base, region.size, tail.max_tokens, group.number, 0))
            placed.append((region.number, tail.start, num_tokens, len(tail.tokens)))
            tokens.append(tail.tokens)
            num_tokens += len(tail.tokens)
        if not placed:
            return
        self._open(fresh)
        receive_kernel[(len(placed),)](
            *self._to_device(placed),
            self._upload(torch.from_numpy(np.concatenate(tokens))),
            self._base,
            self._limit,
            self._known,
            self._group,
            self._arena,
            self._table,
            **self._indexing,
        )

    def finish(self, rows: Iterable[int]) -> None:
        """Sequences stop running on these rows; learn their last tokens first."""
        for row in rows:
            key = self._running.pop(row, None)
            group = self._groups.get(key)
            if group is not None:
                group.num_running -= 1
                if group.has_ended and not group.num_running:
                    self._drop(key)

    def end(self, groups: Iterable[Hashable]) -> None:
        """All requests of these groups have ended, here and elsewhere: free their memory."""
        for key in groups:
            group = self._groups.get(key)
            if group is not None:
                group.has_ended = True
                if not group.num_running:
                    self._drop(key)

    def reset(self) -> None:
        """Forget every group: the weights changed, or another run begins. Only while nothing runs."""
        for key in list(self._groups):
            self._drop(key)
        self._running.clear()
        self._known_rows.clear()
        self._table.zero_()
        self._region_of_row.fill_(-1)
        self._group_of_row.fill_(-1)
        self._counts.zero_()

    def learn(self, rows: torch.Tensor, tokens: torch.Tensor, total: torch.Tensor) -> None:
        """Store and index what became final on `rows`; `tokens` [all rows, width] and `total` are vLLM's own."""
        learn_kernel[(rows.shape[0],)](
            rows,
            tokens,
            tokens.stride(0),
            total,
            self._region_of_row,
            self._base,
            self._limit,
            self._first,
            self._known,
            self._group,
            self._arena,
            self._table,
            **self._indexing,
        )

    def draft(
        self,
        rows: torch.Tensor,
        num_sampled: torch.Tensor,
        last: torch.Tensor,
        tokens: torch.Tensor,
        total: torch.Tensor,
    ) -> torch.Tensor:
        """K tokens for each row of the batch, [rows, K]; the last token again where nothing is known."""
        num_reqs = rows.shape[0]
        draft_kernel[(num_reqs,)](
            rows,
            num_sampled,
            last,
            tokens,
            tokens.stride(0),
            total,
            self._group_of_row,
            self._arena,
            self._table,
            self.drafts,
            self._counts,
            **self._contexts,
            K=self.num_draft_tokens,
            K_POWER_OF_2=power_of_2(self.num_draft_tokens),
            num_warps=1,
        )
        return self.drafts[:num_reqs]

    def counters(self) -> dict[str, int]:
        """Sums since the last reset. Waits for the device."""
        num_drafted_rows, num_matched_rows = self._counts.tolist()
        free_tokens = sum(size for _, size in self._free)
        return {
            "num_drafted_rows": num_drafted_rows,
            "num_matched_rows": num_matched_rows,
            "num_groups": len(self._groups),
            "num_dropped": self.num_dropped,
            "num_freed_groups": self.num_freed_groups,
            "used_arena_tokens": self._arena.numel() - free_tokens,
            "device_bytes": sum(t.nbytes for t in (self._arena, self._table, self._base, self._group, self.drafts)),
        }

    def check(self) -> None:
        """Regions and free spans tile the arena."""
        spans = [*self._free]
        spans += [(r.base, r.size) for group in self._groups.values() for r in group.regions.values()]
        at = 0
        for base, size in sorted(spans):
            assert base == at, f"arena place {at} is owned twice or by none; the next span begins at {base}"
            at = base + size
        assert at == self._arena.numel(), f"the spans end at {at} of {self._arena.numel()}"

    def _size_for(self, max_tokens: int) -> int:
        # A region holds as many -1 at its end as are ever read past a token.
        return -(-(max_tokens + self.num_draft_tokens + 1) // GRAIN_TOKENS) * GRAIN_TOKENS

    def _open(self, fresh: list[tuple[int, ...]]) -> None:
        """Prepare regions: number, base, size, limit, group number, first indexed token."""
        if not fresh:
            return
        numbers, base, size, limit, group_numbers, first = self._to_device(fresh)
        self._base[numbers] = base
        self._size[numbers] = size.to(torch.int32)
        self._limit[numbers] = limit.to(torch.int32)
        self._known[numbers] = 0
        self._group[numbers] = group_numbers
        self._first[numbers] = first.to(torch.int32)
        clear_kernel[(len(fresh),)](numbers, self._base, self._size, self._arena, BLOCK=1024, num_warps=4)

    def _to_device(self, values: list[tuple[int, ...]]) -> torch.Tensor:
        """Columns of the values, each contiguous: kernels take their address and step through them."""
        return self._upload(torch.tensor(values, dtype=torch.int64).T.contiguous())

    def _upload(self, host: torch.Tensor) -> torch.Tensor:
        """Without waiting for the device."""
        if self._device.type != "cuda":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)

    def _take(self, size: int, kept: Collection[Hashable] = ()) -> _Region | None:
        """A region of this size; groups that are `kept` do not make room for it."""
        while True:
            for at, (base, free) in enumerate(self._free):
                if free >= size and self._free_numbers:
                    self._free[at : at + 1] = [(base + size, free - size)] if free > size else []
                    return _Region(self._free_numbers.pop(), base, size)
            idle = next((key for key, one in self._groups.items() if not one.num_running and key not in kept), None)
            if idle is None:
                self.num_dropped += 1
                return None
            self._drop(idle)
            self.num_freed_groups += 1

    def _drop(self, key: Hashable) -> None:
        for region in self._groups.pop(key).regions.values():
            self._give_back(region)

    def _give_back(self, region: _Region) -> None:
        self._free_numbers.append(region.number)
        spans = sorted([*self._free, (region.base, region.size)])
        joined: list[tuple[int, int]] = []
        for base, size in spans:
            if joined and joined[-1][0] + joined[-1][1] == base:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((base, size))
        self._free = joined
