# SPDX-License-Identifier: Apache-2.0
"""Orderings in which a request's rank does not change while it waits.

Most requests arrive together. They are sorted once and read from the end of a list. Requests that are queued again go
into a heap. The first request is the smaller of the two fronts. One heap for all would be correct too, but with a
million requests each removal would walk through twenty levels of memory outside the cache.

Invariants
  1. `peek` shows the waiting request with the smallest rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from seer.buffer import Request
from seer.scheduling.look_ahead import in_heap_order

Rank = tuple[float, ...]
"""Smallest first. It ends with the request's id, so that no two are equal."""


class FixedRank:
    """Base class; subclasses define the rank."""

    def __init__(self) -> None:
        self._sorted: list[tuple[Rank, Request]] = []  # as admitted, the smallest rank last
        self._heap: list[tuple[Rank, Request]] = []  # queued again since

    def rank(self, request: Request) -> Rank:
        """The request's rank; computed once each time it is queued."""
        raise NotImplementedError

    def admit(self, requests: Sequence[Request]) -> None:
        """Queue new requests."""
        self._sorted.extend((self.rank(request), request) for request in requests)
        self._sorted.sort(reverse=True)

    def push(self, request: Request) -> None:
        """Queue a request again."""
        heapq.heappush(self._heap, (self.rank(request), request))

    def peek(self) -> Request | None:
        """The waiting request with the smallest rank."""
        if self._heap and (not self._sorted or self._heap[0] < self._sorted[-1]):
            return self._heap[0][1]
        return self._sorted[-1][1] if self._sorted else None

    def pop(self) -> Request:
        """Remove and return the request that `peek` shows."""
        if self._heap and (not self._sorted or self._heap[0] < self._sorted[-1]):
            return heapq.heappop(self._heap)[1]
        assert self._sorted, "pop without a waiting request"
        return self._sorted.pop()[1]

    def upcoming(self) -> Iterator[Request]:
        """The waiting requests, the smallest rank first."""
        return (request for _, request in heapq.merge(in_heap_order(self._heap), reversed(self._sorted)))

    def granted(self, request: Request, num_tokens: int) -> None:
        """Does nothing: ranks are fixed."""

    def last_first(self, requests: Sequence[Request]) -> Iterator[Request]:
        """From the largest rank down."""
        return iter(sorted(requests, key=self.rank, reverse=True))

    def finished(self, request: Request) -> None:
        """Does nothing: ranks are fixed."""

    def forget(self, family: int) -> None:
        """Does nothing: groups are not remembered."""


class FirstComeFirstServed(FixedRank):
    """One queue: a request that returns from a chunk goes to its end, as in the paper.

    Without a pool its KV would be computed again when its turn comes, so there it goes first instead.
    """

    def __init__(self, *, has_pool: bool = True) -> None:
        super().__init__()
        self._has_pool = has_pool
        self._num_queued = 0

    def rank(self, request: Request) -> Rank:
        """(turn, id); the turn is 0 for a request that goes on at once."""
        self._num_queued += 1
        goes_on = request.num_generated > 0 and not self._has_pool
        return (0 if goes_on else self._num_queued, request.id)
