"""Longest remaining first, for anyone who can say how many tokens a request still needs.

With true lengths this is the `oracle`; with estimates it is the ordering of `seer`. Of two requests that could run now,
the one with more to do goes first, so that all end as near to each other as the memory allows.

Invariants
  1. `peek` shows the waiting request with the most remaining tokens by the latest estimate. Of equals, one of each
     group comes before the second of any, so that every group's length is known soon; then the lower request id.
  2. Each operation costs O(log n), a finish O(group size): stale heap entries are skipped when they surface.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from seer.buffer import Request
from seer.context import Context

Rank = tuple[float, int, int]
"""(minus the level of remaining tokens, minus tokens generated, place among its siblings): smallest first."""


class LongestRemainingFirst:
    """A heap on remaining tokens; when a request finishes, its waiting siblings are estimated anew."""

    def __init__(self, remaining_tokens: Callable[[Request], float], *, level_ratio: float = 1.0) -> None:
        self._remaining_tokens = remaining_tokens
        self._log_ratio = math.log(level_ratio)
        """Of two levels. Within a level the request that is further along goes on, so that requests with nearly equal
        needs do not take turns on the same memory; 1 means that every token counts."""
        self._heap: list[tuple[Rank, int, Request]] = []
        self._key: dict[int, Rank] = {}  # of waiting requests, as last pushed
        self._waiting_of_group: dict[int, dict[int, Request]] = {}

    def push(self, request: Request) -> None:
        """The request waits."""
        self._waiting_of_group.setdefault(request.group.id, {})[request.id] = request
        self._estimate(request)

    def peek(self) -> Request | None:
        """The one with the most to do."""
        while self._heap:
            key, id, request = self._heap[0]
            if self._key.get(id) == key:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take it."""
        request = self.peek()
        assert request is not None, "pop without a waiting request"
        heapq.heappop(self._heap)
        del self._key[request.id]
        del self._waiting_of_group[request.group.id][request.id]
        return request

    def granted(self, request: Request, num_tokens: int) -> None:
        """What it needs does not change."""

    def finished(self, request: Request) -> None:
        """Its length may change what is expected of its siblings."""
        for sibling in self._waiting_of_group.get(request.group.id, {}).values():
            self._estimate(sibling)

    def _estimate(self, request: Request) -> None:
        key = self._rank(request)
        if self._key.get(request.id) != key:
            self._key[request.id] = key
            heapq.heappush(self._heap, (key, request.id, request))

    def _rank(self, request: Request) -> Rank:
        remaining = max(1.0, self._remaining_tokens(request))
        level = math.floor(math.log(remaining) / self._log_ratio) if self._log_ratio else remaining
        return (-level, -request.num_generated, request.index)


OVERRUN = 2.0
"""A request that outran its group's estimate is expected to need so many times its present length again: lengths have
heavy tails, and a runaway that waits behind the rest is what everybody waits for in the end."""


def expected_remaining_tokens(context: Context, request: Request) -> float:
    """Tokens the request is expected to need yet: its group's estimate, stretched where it has outrun that."""
    expected = context.expected_tokens(request.group)
    stretched = min(request.num_generated * (1.0 + OVERRUN), float(request.max_tokens))
    return max(float(expected), stretched) - request.num_generated
