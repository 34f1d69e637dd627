# SPDX-License-Identifier: Apache-2.0
"""Seer's own scheduler: ordering by what is scarce, leases instead of chunks, placement by the earliest finish.

Three differences from the paper, each measured in docs/design/0002-simulator.md:

1. *Ordering.* While memory is scarce, the request that may still need the most tokens runs first; while sequence slots
   are, the one that is expected to (memory_or_slot.py says why). Memory counts as scarcer when a larger share of it is
   reserved. Probes have no class of their own.
2. *Leases.* A request stays on its instance as long as nothing speaks against it (leases.py). Memory is reserved for
   the lease ahead, not for a chunk's end. The prompt's blocks are counted once for siblings on one instance. Without a
   pool a request that leaves would be computed again, so it gets chunks with their memory: half of its context, within
   128 to 1,536 tokens, or more while memory is plentiful.
3. *Placement.* A step takes longer the fuller an instance is. A request is placed where the instance's longest request,
   this one included, would end earliest: short requests share instances, long ones get emptier and faster ones. On
   several nodes, the instances of the node that holds a request's KV are always considered, and win near ties.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from seer.buffer import Request
from seer.context import Context
from seer.fleet import Fleet
from seer.placement import Place, PlacementConfig, loads_kv
from seer.scheduling.base import Assignment, Renewal
from seer.scheduling.divided import Divided, end_with_a_block, fill_last_block
from seer.scheduling.leases import (
    CONTEXT_PER_LEASE,
    LEASE_TOKENS,
    LEASES_AT_MOST,
    RESERVE_TOKENS,
    LeaseRenewal,
    RankedOrdering,
    Tenants,
)
from seer.scheduling.memory_or_slot import MemoryOrSlotOrdering, expected_remaining_tokens

MIN_CHUNK_TOKENS = 128
"""Without a pool, a shorter chunk costs more than the memory it saves: returning a request takes about one step."""
CONTEXT_PER_CHUNK = 2
"""Context tokens per chunk token while memory is scarce: at most about a third of the reserved memory is unused."""
TIGHT_CHUNK_TOKENS = (MIN_CHUNK_TOKENS, 1536)
"""Shortest and longest chunk while memory is scarce. On average half of a chunk's memory is reserved and unused."""
CHUNKS_AT_LEAST = 8
"""With several instances, a response of full length is asked about at least this often, so that the tail can be spread
over idle ones."""
IDLE_STEP_SHARE = 0.4
"""Time of a step on an empty instance over that on a full one: 0.3 to 0.5 in the cost models. Results depend little on
it."""
STAY_BONUS = 0.1
"""Share by which the instance that already holds the KV may end its longest request later and still be chosen."""
NODE_BONUS = 0.05
"""The same for another instance of the node that holds the KV: it comes from there through shared memory."""
UNEVEN_SHARE = 0.25
UNEVEN_REQUESTS = 2
"""An instance may run this share and this many requests more than the least loaded candidate. Otherwise short requests
would be packed together and leave others idle."""
STALE_AT_MOST = 64
"""Entries of requests that have left an instance, beside as many as run there, before they are dropped."""
CANDIDATES = 8
"""Instances considered from either end of the order by free memory: limits the cost of a decision on large fleets."""


class EarliestFinishPlacement(Divided):
    """Leases, placed by the earliest finish, with any ordering: the base of `seer` and `seer-oracle`."""

    extends_leases = True

    def __init__(
        self,
        ordering: RankedOrdering,
        remaining_tokens: Callable[[Request], float],
        *,
        slot_tokens: Callable[[Request], float] | None = None,
        max_chunk_tokens: int,
        placement: PlacementConfig | None = None,
        whole_blocks: bool = False,
    ) -> None:
        """`remaining_tokens` estimates what a request still needs, for placement; `slot_tokens` for how many it keeps
        its sequence slot, if that is another number.
        """
        super().__init__(ordering, chunk_tokens=max_chunk_tokens, placement=placement, whole_blocks=whole_blocks)
        self._remaining_tokens = remaining_tokens
        self._has_pool = self._placement.transfer is not None
        self._num_active = 0
        self._tenants = Tenants()
        self._renewal = LeaseRenewal(
            self._tenants,
            ordering=ordering,
            more_tokens=self._more_tokens,
            remaining_tokens=slot_tokens or remaining_tokens,
            may_park=self._has_pool,
        )
        self._longest: dict[int, list[tuple[float, int, int]]] = {}  # instance -> heap of (-remaining, request, turn)
        self._turn: dict[int, int] = {}  # request -> number of its running chunk; absent while it waits
        self._num_turns = 0

    def admit(self, requests: Sequence[Request], fleet: Fleet) -> None:
        """Queue new requests."""
        self._num_active += len(requests)
        super().admit(requests, fleet)

    def requeue(self, request: Request) -> None:
        """Queue a request for its next chunk."""
        self._turn.pop(request.id, None)
        self._tenants.leave(request)
        super().requeue(request)

    def away(self, request: Request) -> None:
        """It has left its instance."""
        self._turn.pop(request.id, None)
        self._tenants.leave(request)

    def finished(self, request: Request) -> None:
        """It no longer counts for its instance's longest request."""
        self._turn.pop(request.id, None)
        self._tenants.leave(request)
        self._num_active -= 1
        super().finished(request)

    def renew(self, low: Sequence[Request], fleet: Fleet) -> Renewal:
        """Extend the leases that run low; park where memory or slots are short or another instance is emptier."""
        first = self._first_waiting() if low else None
        for_a_slot = first if self._slots_are_scarce() else None
        return self._renewal.renew(low, fleet, may_move=bool(low) and first is None, for_a_slot=for_a_slot)

    def _slots_are_scarce(self) -> bool:
        """Whether a request may leave its slot to one that waits. With true lengths the longest have started first."""
        return False

    def _more_tokens(self, requests: Sequence[Request], fleet: Fleet) -> list[int]:
        """Tokens that fill each lease up again."""
        sizes = self._sizes(requests, fleet)
        if self._whole_blocks:
            pairs = zip(requests, sizes, strict=True)
            sizes = [self.cut(request, size, fleet.block_size) for request, size in pairs]
        more = []
        for request, size in zip(requests, sizes, strict=True):
            remaining = request.chunk_remaining
            most = request.max_tokens - request.num_generated - remaining
            wanted = size - remaining if size > remaining else 1
            more.append(wanted if wanted < most else most)
        return more

    def chunk_tokens(self, request: Request, fleet: Fleet) -> int:
        """A lease, where KV is kept in a pool while a request waits; else a chunk with its memory, as in the paper."""
        return self._sizes((request,), fleet)[0]

    def _sizes(self, requests: Sequence[Request], fleet: Fleet) -> list[int]:
        """The leases, or chunks, of several requests."""
        are_many = len(fleet) > 1
        fair_share = fleet.free_tokens // (2 * max(1, self._num_active))
        sizes = []
        limit = least = most = -1
        for request in requests:
            if request.max_tokens != limit:
                limit, most = request.max_tokens, self._chunk_tokens
                if are_many:  # so that the tail can be spread over idle instances
                    most = min(most, max(MIN_CHUNK_TOKENS, limit // CHUNKS_AT_LEAST))
                least = max(LEASE_TOKENS, limit // LEASES_AT_MOST, fair_share)
            if self._has_pool:
                size = request.num_tokens // CONTEXT_PER_LEASE
                size = size if size > least else least
            else:
                shortest, longest = TIGHT_CHUNK_TOKENS
                size = max(min(max(shortest, request.num_tokens // CONTEXT_PER_CHUNK), longest), fair_share)
            sizes.append(size if size < most else most)
        return sizes

    def cut(self, request: Request, max_tokens: int, block_size: int) -> int:
        """A lease fills the blocks it reserves. A chunk leaves whole blocks, and so does a lease that may end as one,
        because it is too short to be extended in time.
        """
        is_extended = self._has_pool and max_tokens >= LEASE_TOKENS
        return (fill_last_block if is_extended else end_with_a_block)(request, max_tokens, block_size)

    def place(self, request: Request, max_tokens: int, fleet: Fleet) -> Place | None:
        """The instance whose longest request, this one included, would end earliest."""
        num_tokens = request.num_tokens + max_tokens
        num_blocks = fleet.blocks(num_tokens)
        candidates = self._candidates(request, num_tokens, fleet)
        home = request.last_instance
        if not candidates:
            return None
        if not request.attempt and home in candidates:  # a later turn: what it has is in that engine's cache alone
            candidates = [home]
        remaining = self._remaining_tokens(request)
        instance = self._earliest_end(candidates, remaining, num_blocks, home, fleet)
        self._tenants.enter(request, instance)
        self._num_turns += 1
        self._turn[request.id] = self._num_turns
        self._remember_longest(instance, (-remaining, request.id, self._num_turns), fleet.in_flight[instance])
        return Place(instance, loads_kv(request, instance, fleet, self._placement))

    def shared_blocks(self, request: Request, fleet: Fleet) -> int:
        """Full blocks of its prompt: engines hold them once for all siblings."""
        return request.group.num_prompt_tokens // fleet.block_size if self._has_pool else 0

    def _candidates(self, request: Request, num_tokens: int, fleet: Fleet) -> list[int]:
        """Instances with room."""
        num_blocks, shared = fleet.blocks(num_tokens), self.shared_blocks(request, fleet)
        found = fleet.candidates(num_blocks - shared, CANDIDATES, num_tokens)
        home = request.last_instance
        if home is not None:
            near = fleet.nodes.members(home) if fleet.nodes.are_many else (home,)
            found += [i for i in near if i not in found and fleet.has_room(i, num_blocks - shared, num_tokens)]
        reserve_tokens = RESERVE_TOKENS if self._has_pool else 0
        free, in_flight, size = fleet.free_blocks, fleet.in_flight, fleet.block_size
        return [
            i
            for i in found
            if free[i] - num_blocks + fleet.shared_here(request, i, shared) >= in_flight[i] * reserve_tokens // size
        ]

    def _earliest_end(
        self, candidates: Sequence[int], remaining: float, num_blocks: int, home: int | None, fleet: Fleet
    ) -> int:
        """Choose among the candidates that are not much busier than the others; ties go to the lowest id.

        One plain loop, because this is half of the cost of a decision.
        """
        free_blocks, in_flight, limits = fleet.free_blocks, fleet.in_flight, fleet.limits
        most = min([in_flight[instance] for instance in candidates]) * (1.0 + UNEVEN_SHARE) + UNEVEN_REQUESTS
        near = fleet.nodes.members(home) if home is not None and fleet.nodes.are_many else ()
        chosen, earliest = -1, math.inf
        for instance in candidates:
            if in_flight[instance] > most:
                continue
            full = 1.0 - (free_blocks[instance] - num_blocks) / limits[instance].kv_blocks
            longest = self._longest_remaining(instance)
            ends = longest if longest > remaining else remaining
            ends *= IDLE_STEP_SHARE + (1.0 - IDLE_STEP_SHARE) * full
            if instance == home:
                ends *= 1.0 - STAY_BONUS
            elif instance in near:
                ends *= 1.0 - NODE_BONUS
            if ends < earliest or (ends == earliest and instance < chosen):
                chosen, earliest = instance, ends
        return chosen

    def _remember_longest(self, instance: int, entry: tuple[float, int, int], num_running: int) -> None:
        """Also drop what has left, once that is most of the heap: short requests never reach its top."""
        heap = self._longest.setdefault(instance, [])
        heapq.heappush(heap, entry)
        if len(heap) > 2 * num_running + STALE_AT_MOST:
            heap[:] = [one for one in heap if self._turn.get(one[1]) == one[2]]
            heapq.heapify(heap)

    def _longest_remaining(self, instance: int) -> float:
        heap = self._longest.get(instance)
        if not heap:
            return 0.0
        turn = self._turn
        while heap and turn.get(heap[0][1]) != heap[0][2]:
            heapq.heappop(heap)
        return -heap[0][0] if heap else 0.0


class Seer(EarliestFinishPlacement):
    """`seer`. Its speculation is done by the instances."""

    def __init__(
        self,
        context: Context,
        *,
        max_chunk_tokens: int,
        placement: PlacementConfig | None = None,
        whole_blocks: bool = False,
    ) -> None:
        placement = placement or PlacementConfig()
        self._scarcity = MemoryOrSlotOrdering(context, has_pool=placement.transfer is not None)
        super().__init__(
            self._scarcity,
            lambda request: expected_remaining_tokens(context, request),
            slot_tokens=self._scarcity.slot_tokens,
            max_chunk_tokens=max_chunk_tokens,
            placement=placement,
            whole_blocks=whole_blocks,
        )

    def _slots_are_scarce(self) -> bool:
        return not self._scarcity.memory_is_scarce

    def next(self, fleet: Fleet) -> Assignment | None:
        """The first request, by what is scarce now."""
        # Compares the reserved shares of memory and of sequence slots, multiplied out to stay in integers.
        promised_tokens = fleet.kv_tokens - fleet.free_tokens
        self._scarcity.memory_is_scarce = promised_tokens * fleet.max_num_seqs >= len(self._turn) * fleet.kv_tokens
        return super().next(fleet)
