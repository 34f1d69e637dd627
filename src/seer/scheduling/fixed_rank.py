"""Orderings in which a request's rank does not move while it waits.

Most requests come at once and few come back, so those that come together are sorted once and read from the end of a
list; only those that come back go into a heap. The best is the better of the two. One heap of all would do the same,
but taking the best of a million then walks twenty levels down memory that no cache holds.

Invariant: `peek` shows the waiting request with the smallest rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from seer.buffer import Request

Rank = tuple[float, ...]
"""Smallest first. It ends with the request's id: no two are equal."""


class FixedRank:
    """Base: says nothing about the rank itself."""

    def __init__(self) -> None:
        self._sorted: list[tuple[Rank, Request]] = []  # as admitted, the best last
        self._heap: list[tuple[Rank, Request]] = []  # come back since

    def rank(self, request: Request) -> Rank:
        """Where it stands among those that wait; read once, when it begins to wait."""
        raise NotImplementedError

    def admit(self, requests: Sequence[Request]) -> None:
        """These requests wait."""
        self._sorted.extend((self.rank(request), request) for request in requests)
        self._sorted.sort(reverse=True)

    def push(self, request: Request) -> None:
        """The request waits again."""
        heapq.heappush(self._heap, (self.rank(request), request))

    def peek(self) -> Request | None:
        """The waiting request of the smallest rank."""
        if self._heap and (not self._sorted or self._heap[0] < self._sorted[-1]):
            return self._heap[0][1]
        return self._sorted[-1][1] if self._sorted else None

    def pop(self) -> Request:
        """Take it."""
        if self._heap and (not self._sorted or self._heap[0] < self._sorted[-1]):
            return heapq.heappop(self._heap)[1]
        assert self._sorted, "pop without a waiting request"
        return self._sorted.pop()[1]

    def granted(self, request: Request, num_tokens: int) -> None:
        """No rank moves."""

    def finished(self, request: Request) -> None:
        """Nothing is learned."""


class FirstComeFirstServed(FixedRank):
    """Requests in order of admission; one that was begun goes on before one that was not."""

    def rank(self, request: Request) -> Rank:
        """(not begun, id): ids count the admitted."""
        return (request.num_generated == 0, request.id)
