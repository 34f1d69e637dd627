# SPDX-License-Identifier: Apache-2.0
"""Context-aware ordering, as in the paper (Alg. 2): probes shortest first, then the longest group first.

One request per group is its probe. Probes run before all others, the one with the fewest tokens first: so short groups
are recognised quickly and long ones keep running. Once every probe is running or done, the others are taken from the
group with the longest estimate. Ties go to the group that was granted the fewest tokens, then to the request that has
generated more. One decision in `starvation_period` goes to the group with the least service, so that none starves.

Invariants
  1. No other request is chosen while a probe waits.
  2. Of two waiting groups, the one with the larger estimate is chosen first, except for one decision in
     `starvation_period`.
  3. Each operation costs O(log n), amortised: a stale heap entry is corrected when it reaches the top.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from seer.buffer import Request
from seer.context import Context
from seer.scheduling.look_ahead import in_heap_order
from seer.types import Group

ID_BITS = SERVICE_BITS = 32
"""Widths of the parts of a group's rank, which is one integer: more than any number of groups, or tokens granted."""


class ProbesThenLongestGroup:
    """The paper's ordering over a `Context` of length estimates."""

    def __init__(self, context: Context, *, starvation_period: int = 64) -> None:
        self._context = context
        self._starvation_period = starvation_period
        """One decision in this many goes to the least served group; 0 turns this off."""
        self._num_decisions = 0
        self._probes: list[tuple[int, int, Request]] = []
        self._members: dict[int, list[tuple[int, int, Request]]] = {}  # group -> heap, furthest along first
        self._by_length = GroupHeap()
        self._by_service = GroupHeap()

    def admit(self, requests: Sequence[Request]) -> None:
        """Queue new requests."""
        for request in requests:
            self.push(request)

    def push(self, request: Request) -> None:
        """Queue a request."""
        if request.is_probe:
            heapq.heappush(self._probes, (request.num_generated, request.id, request))
            return
        members = self._members.setdefault(request.group.family, [])
        heapq.heappush(members, (-request.num_generated, request.id, request))
        self._rank(request.group)

    def peek(self) -> Request | None:
        """The waiting probe with the fewest tokens; else the request of the chosen group with the most."""
        if self._probes:
            return self._probes[0][2]
        group = self._chosen_group()
        return None if group is None else self._members[group][0][2]

    def pop(self) -> Request:
        """Remove and return the request that `peek` shows."""
        if self._probes:
            return heapq.heappop(self._probes)[2]
        group = self._chosen_group()
        assert group is not None, "pop without a waiting request"
        self._num_decisions += 1
        members = self._members[group]
        request = heapq.heappop(members)[2]
        if not members:
            self._by_length.leave(group)
            self._by_service.leave(group)
        return request

    def upcoming(self) -> Iterator[Request]:
        """The waiting probes in order, then the requests of the group that is chosen next."""
        yield from (entry[2] for entry in in_heap_order(self._probes))
        group = self._chosen_group()
        if group is not None:
            yield from (entry[2] for entry in in_heap_order(self._members[group]))

    def granted(self, request: Request, num_tokens: int) -> None:
        """Count the granted tokens, which decide between groups of equal estimate."""
        self._context.grant(request, num_tokens)
        if self._members.get(request.group.family):
            self._rank(request.group)

    def finished(self, request: Request) -> None:
        """Rank the group again: its estimate may have changed."""
        if self._members.get(request.group.family):
            self._rank(request.group)

    def forget(self, family: int) -> None:
        """No more requests of it come; any that still wait were cancelled."""
        if self._members.pop(family, None):
            self._by_length.leave(family)
            self._by_service.leave(family)

    def _chosen_group(self) -> int | None:
        period = self._starvation_period
        if period and self._num_decisions % period == period - 1:
            return self._by_service.top()
        return self._by_length.top()

    def _rank(self, group: Group) -> None:
        by_service = (self._context.service_tokens(group) << ID_BITS) + group.family
        self._by_service.enter(group.family, by_service)
        self._by_length.enter(
            group.family, by_service - (self._context.expected_tokens(group) << SERVICE_BITS + ID_BITS)
        )


class GroupHeap:
    """Groups with waiting requests by rank, smallest first. A rank that grows costs nothing until it reaches the top.

    A rank is one integer that ends with the group's id: tuples would add cache misses at each level of a large heap.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._heap: list[int] = []
        self._entered: dict[int, int] = {}  # group -> its valid entry in the heap

    def enter(self, group: int, rank: int) -> None:
        """Set the rank of a group with waiting requests."""
        self._ranks[group] = rank
        entered = self._entered.get(group)
        if entered is None or rank < entered:
            self._entered[group] = rank
            heapq.heappush(self._heap, rank)

    def leave(self, group: int) -> None:
        """Remove a group: none of its requests waits."""
        del self._ranks[group]
        if len(self._heap) > 2 * len(self._ranks):  # else those that never reach the top would stay for good
            self._entered = {one: entry for one, entry in self._entered.items() if one in self._ranks}
            self._heap = list(self._entered.values())
            heapq.heapify(self._heap)

    def top(self) -> int | None:
        """The group with the smallest rank."""
        while self._heap:
            entry = self._heap[0]
            group = entry & (1 << ID_BITS) - 1
            rank = self._ranks.get(group)
            if rank == entry:
                return group
            if self._entered.get(group) != entry:
                heapq.heappop(self._heap)
            elif rank is None:
                heapq.heappop(self._heap)
                del self._entered[group]
            else:
                self._entered[group] = rank
                heapq.heapreplace(self._heap, rank)
        return None
