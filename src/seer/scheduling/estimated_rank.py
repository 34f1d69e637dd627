"""An ordering in which a request's rank moves, while it waits, with its group's estimate.

An estimate moves when a request of the group finishes, and with it all waiting siblings. Those that have not begun
differ in nothing but their place in the group: they move as one, and only the first of them stands in the heap.

Invariants
  1. `peek` shows the waiting request with the smallest rank by the latest estimates.
  2. Each operation costs O(log n); a finish that moves its group's estimate, O(log n) for each begun sibling that
     waits. Stale heap entries are skipped when they surface.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from seer.buffer import Request
from seer.context import Context
from seer.scheduling.fixed_rank import Rank


class EstimatedRank:
    """A heap; when a group's estimate moves, its waiting requests are ranked anew."""

    def __init__(self, context: Context, rank: Callable[[Request], Rank]) -> None:
        """`rank` may read the request and its group's estimate; of those not begun, the lower index is to be first."""
        self._context = context
        self._rank = rank
        self._heap: list[tuple[Rank, Request]] = []
        self._shown: dict[int, Rank] = {}  # requests that stand in the heap, with the rank they have there
        self._fresh: dict[int, list[tuple[int, Request]]] = {}  # group -> heap by index of those not begun
        self._begun: dict[int, dict[int, Request]] = {}  # group -> the others that wait, all of them shown
        self._expected: dict[int, int] = {}  # group -> the estimate when one of its requests last finished

    def admit(self, requests: Sequence[Request]) -> None:
        """These requests wait."""
        for request in requests:
            self.push(request)

    def push(self, request: Request) -> None:
        """The request waits."""
        group = request.group.id
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
        """All that wait, in no particular order; linear."""
        fresh = [request for members in self._fresh.values() for _, request in members]
        return fresh + [request for members in self._begun.values() for request in members.values()]

    def peek(self) -> Request | None:
        """The waiting request of the smallest rank."""
        while self._heap:
            rank, request = self._heap[0]
            if self._shown.get(request.id) == rank:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take it."""
        request = self.peek()
        assert request is not None, "pop without a waiting request"
        heapq.heappop(self._heap)
        self.take(request)
        return request

    def take(self, request: Request) -> None:
        """It waits no more, the best or not; of a group's requests not begun, the first can be taken."""
        del self._shown[request.id]
        group = request.group.id
        if request.num_generated:
            del self._begun[group][request.id]
            return
        fresh = self._fresh[group]
        heapq.heappop(fresh)
        if fresh:
            self._show(fresh[0][1])

    def granted(self, request: Request, num_tokens: int) -> None:
        """What it needs does not change."""

    def finished(self, request: Request) -> None:
        """Its length may change what is expected of its siblings."""
        group = request.group.id
        expected = self._context.expected_tokens(request.group)
        if self._expected.get(group) == expected:
            return
        self._expected[group] = expected
        for sibling in self._begun.get(group, {}).values():
            self._show(sibling)
        if fresh := self._fresh.get(group):
            self._show(fresh[0][1])

    def _show(self, request: Request) -> None:
        rank = self._rank(request)
        if self._shown.get(request.id) != rank:
            self._shown[request.id] = rank
            heapq.heappush(self._heap, (rank, request))
