# SPDX-License-Identifier: Apache-2.0
"""An ordering in which a waiting request's rank changes with its group's estimated length.

An estimate changes when a request of the group finishes, and with it the ranks of all waiting siblings. Siblings that
have not started differ only in their index in the group, so only the first of them is in the heap.

Invariants
  1. `peek` shows the waiting request with the smallest rank by the latest estimates.
  2. Each operation costs O(log n), amortised. A finish that changes its group's estimate costs O(log n) for each
     waiting sibling that has started. Stale heap entries are skipped when they reach the top.
  3. There are at most as many stale entries as waiting requests that are shown: each keeps its request and the tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from seer.buffer import Request
from seer.context import Context
from seer.scheduling.fixed_rank import Rank
from seer.scheduling.look_ahead import in_heap_order


class EstimatedRank:
    """A heap. When a group's estimate changes, its waiting requests are ranked again."""

    def __init__(self, context: Context, rank: Callable[[Request], Rank]) -> None:
        """`rank` may depend on the request and its group's estimate. Before the start, it must grow with the index."""
        self._context = context
        self._rank = rank
        self._heap: list[tuple[Rank, Request]] = []
        self._shown: dict[int, Rank] = {}  # request -> its rank in the heap
        self._fresh: dict[int, list[tuple[int, Request]]] = {}  # group -> heap by index of requests not started
        self._begun: dict[int, dict[int, Request]] = {}  # group -> waiting requests that have started, all in the heap
        self._expected: dict[int, object] = {}  # group -> its estimates when one of its requests last finished

    def admit(self, requests: Sequence[Request]) -> None:
        """Queue new requests."""
        for request in requests:
            self.push(request)

    def push(self, request: Request) -> None:
        """Queue a request."""
        group = request.group.family
        if request.num_generated:
            self._begun.setdefault(group, {})[request.id] = request
            self._show(request)
            return
        fresh = self._fresh.setdefault(group, [])
        first = fresh[0][1] if fresh else None
        heapq.heappush(fresh, (request.index, request))
        if fresh[0][1] is request:
            if first is not None:
                del self._shown[first.id]
            self._show(request)

    def waiting(self) -> list[Request]:
        """All waiting requests, in no particular order, in linear time."""
        fresh = [request for members in self._fresh.values() for _, request in members]
        return fresh + [request for members in self._begun.values() for request in members.values()]

    def peek(self) -> Request | None:
        """The waiting request with the smallest rank."""
        while self._heap:
            rank, request = self._heap[0]
            if self._shown.get(request.id) == rank:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Remove and return the request that `peek` shows."""
        request = self.peek()
        assert request is not None, "pop without a waiting request"
        heapq.heappop(self._heap)
        self.take(request)
        return request

    def take(self, request: Request) -> None:
        """Remove any request. Of a group's requests that have not started, only the first can be removed."""
        del self._shown[request.id]
        group = request.group.family
        if request.num_generated:
            del self._begun[group][request.id]
        else:
            fresh = self._fresh[group]
            heapq.heappop(fresh)
            if fresh:
                self._show(fresh[0][1])
        self._trim()

    def upcoming(self) -> Iterator[Request]:
        """The waiting requests in order; of a group's requests that have not started, only the first."""
        seen = set()
        for rank, request in in_heap_order(self._heap):
            if self._shown.get(request.id) == rank and request.id not in seen:
                seen.add(request.id)
                yield request

    def granted(self, request: Request, num_tokens: int) -> None:
        """Does nothing: ranks do not depend on grants."""

    def finished(self, request: Request) -> None:
        """Rank its waiting siblings again if their estimate has changed."""
        group = request.group.family
        expected = self._context.expected_tokens(request.group), self._context.turns.of(request.group)
        if self._expected.get(group) == expected:
            return
        self._expected[group] = expected
        for sibling in self._begun.get(group, {}).values():
            self._show(sibling)
        if fresh := self._fresh.get(group):
            self._show(fresh[0][1])

    def rank_all(self) -> None:
        """Rank all waiting requests again, in linear time: what ranks depend on has changed for all."""
        for members in self._begun.values():
            for request in members.values():
                self._show(request)
        for fresh in self._fresh.values():
            if fresh:
                self._show(fresh[0][1])

    def forget(self, family: int) -> None:
        """No more requests of it come; any that still wait were cancelled."""
        cancelled = [request.id for _, request in self._fresh.pop(family, ())] + [*self._begun.pop(family, ())]
        for request in cancelled:
            self._shown.pop(request, None)
        self._expected.pop(family, None)
        self._trim()

    def _show(self, request: Request) -> None:
        rank = self._rank(request)
        if self._shown.get(request.id) != rank:
            self._shown[request.id] = rank
            heapq.heappush(self._heap, (rank, request))
            self._trim()

    def _trim(self) -> None:
        if len(self._heap) > 2 * len(self._shown):
            valid = {request.id: (rank, request) for rank, request in self._heap if self._shown.get(request.id) == rank}
            self._heap = list(valid.values())
            heapq.heapify(self._heap)
