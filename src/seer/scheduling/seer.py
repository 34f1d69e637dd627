"""Seer's own scheduler: an order by what is scarce, chunks that fit, and the slowest request in mind.

Three departures from the paper, each measured in docs/design/0002-simulator.md:

1. *Order* by what there is too little of: while memory is, the request least far along, which may still become the
   longest; while sequence slots are, the one expected to need the most (seer.scheduling.memory_or_slot says why).
   Memory counts
   as the scarcer where the larger share of it is promised. Probes need no class of their own.
2. *Chunks that fit.* A chunk's end is what memory is promised for, so a long chunk wastes memory that others could
   use. While memory is scarce a chunk is half of the request's context, within 128 to 1,536 tokens; where it is
   plentiful, an eighth of the longest response.
3. *Place by the slowest.* A step takes longer the fuller an instance is, so a request is placed where the instance's
   longest request would still end earliest: short ones pack together, long ones get room and speed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from seer.buffer import Request
from seer.context import Context
from seer.placement import Fleet, Place, PlacementConfig, loads_kv
from seer.scheduling.base import Assignment
from seer.scheduling.divided import Divided, Ordering
from seer.scheduling.memory_or_slot import MemoryOrSlotOrdering, expected_remaining_tokens

MIN_CHUNK_TOKENS = 128
"""Below this, handing a request over costs more than the memory it saves: about one step per chunk."""
CONTEXT_PER_CHUNK = 2
TIGHT_CHUNK_TOKENS = (MIN_CHUNK_TOKENS, 1536)
"""Shortest and longest chunk while memory is scarce: on average half of it is promised and not yet used."""
CHUNKS_AT_LEAST = 8
"""A response of full length comes back this often however much memory there is, so that the tail can be spread anew."""
IDLE_STEP_SHARE = 0.4
"""Time of a step on an empty instance over that on a full one; 0.3 to 0.5 in the cost models, and not sensitive."""
STAY_BONUS = 0.1
"""How much later an instance may end its longest request and still be preferred for holding the KV already."""
UNEVEN_SHARE = 0.25
UNEVEN_REQUESTS = 2
"""An instance may run so many more requests than the one that runs fewest: packing short requests together must not
leave others idle while memory is plentiful."""
CANDIDATES = 8
"""Instances looked at from either end of the order by free memory; bounds the cost of a decision on large fleets."""


class EarliestFinishPlacement(Divided):
    """Chunks that fit, placed by the slowest, in any order: what `seer` and `seer-oracle` share."""

    def __init__(
        self,
        ordering: Ordering,
        remaining_tokens: Callable[[Request], float],
        *,
        max_chunk_tokens: int,
        placement: PlacementConfig | None = None,
        whole_blocks: bool = False,
    ) -> None:
        """`ordering` says who is next; `remaining_tokens`, what a request is expected to need yet, where it goes."""
        super().__init__(ordering, chunk_tokens=max_chunk_tokens, placement=placement, whole_blocks=whole_blocks)
        self._remaining_tokens = remaining_tokens
        self._num_active = 0
        self._longest: dict[int, list[tuple[float, int, int]]] = {}  # instance -> heap of (-remaining, request, turn)
        self._turn: dict[int, int] = {}  # request -> number of its running chunk; absent while it waits
        self._num_turns = 0

    def admit(self, requests: Sequence[Request], fleet: Fleet) -> None:
        """All wait for their first chunk."""
        self._num_active += len(requests)
        super().admit(requests, fleet)

    def requeue(self, request: Request) -> None:
        """It waits for its next chunk."""
        self._turn.pop(request.id, None)
        super().requeue(request)

    def finished(self, request: Request) -> None:
        """It is out of the way of its instance's longest."""
        self._turn.pop(request.id, None)
        self._num_active -= 1
        super().finished(request)

    def chunk_tokens(self, request: Request, fleet: Fleet) -> int:
        """Half of the context, or half of an equal share of the free memory if that is more."""
        fair_share = fleet.free_tokens // (2 * max(1, self._num_active))
        shortest, longest = TIGHT_CHUNK_TOKENS
        tight = min(max(shortest, request.num_tokens // CONTEXT_PER_CHUNK), longest)
        fitting = max(tight, fair_share)
        return min(fitting, self._chunk_tokens, max(MIN_CHUNK_TOKENS, request.max_tokens // CHUNKS_AT_LEAST))

    def place(self, request: Request, max_tokens: int, fleet: Fleet) -> Place | None:
        """The instance whose longest request, this one included, would end earliest."""
        num_blocks = fleet.limits[0].blocks(request.num_tokens + max_tokens)
        candidates = fleet.candidates(num_blocks, CANDIDATES)
        home = request.last_instance
        if home is not None and fleet.has_room(home, num_blocks):
            candidates.append(home)
        if not candidates:
            return None
        remaining = self._remaining_tokens(request)
        instance = self._earliest_end(candidates, remaining, num_blocks, home, fleet)
        self._num_turns += 1
        self._turn[request.id] = self._num_turns
        heapq.heappush(self._longest.setdefault(instance, []), (-remaining, request.id, self._num_turns))
        return Place(instance, loads_kv(request, instance, fleet, self._placement))

    def _earliest_end(
        self, candidates: Sequence[int], remaining: float, num_blocks: int, home: int | None, fleet: Fleet
    ) -> int:
        """Of the candidates that are not much busier than the others; the lowest id among equals.

        One plain loop: this is half of what a decision costs.
        """
        free_blocks, in_flight, limits = fleet.free_blocks, fleet.in_flight, fleet.limits
        most = min([in_flight[instance] for instance in candidates]) * (1.0 + UNEVEN_SHARE) + UNEVEN_REQUESTS
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
            if ends < earliest or (ends == earliest and instance < chosen):
                chosen, earliest = instance, ends
        return chosen

    def _longest_remaining(self, instance: int) -> float:
        heap = self._longest.get(instance)
        if not heap:
            return 0.0
        turn = self._turn
        while heap and turn.get(heap[0][1]) != heap[0][2]:
            heapq.heappop(heap)
        return -heap[0][0] if heap else 0.0


class Seer(EarliestFinishPlacement):
    """`seer` without its speculation, which the instances do."""

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
            max_chunk_tokens=max_chunk_tokens,
            placement=placement,
            whole_blocks=whole_blocks,
        )

    def next(self, fleet: Fleet) -> Assignment | None:
        """The best request by what is scarce now."""
        limits, num_alive = fleet.limits[0], fleet.num_alive
        # Shares of sequence slots and of memory that are promised, both times instances, sequence slots and tokens.
        kv_tokens = limits.kv_blocks * limits.block_size
        promised_tokens = kv_tokens * num_alive - fleet.free_tokens
        self._scarcity.memory_is_scarce = promised_tokens * limits.max_num_seqs >= len(self._turn) * kv_tokens
        return super().next(fleet)
