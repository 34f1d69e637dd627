"""Longest remaining first, for anyone who can say how many tokens a request still needs.

With true lengths this is the `oracle`. Of two requests that could run now, the one with more to do goes first, so that
all end as near to each other as the memory allows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from seer.buffer import Request


class LongestRemainingFirst:
    """A heap on remaining tokens, fixed when a request begins to wait."""

    def __init__(self, remaining_tokens: Callable[[Request], float]) -> None:
        self._remaining_tokens = remaining_tokens
        self._heap: list[tuple[float, int, Request]] = []

    def push(self, request: Request) -> None:
        """The request waits."""
        heapq.heappush(self._heap, (-self._remaining_tokens(request), request.id, request))

    def peek(self) -> Request | None:
        """The one with the most to do."""
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        """Take it."""
        return heapq.heappop(self._heap)[2]

    def granted(self, request: Request, num_tokens: int) -> None:
        """What it needs does not change."""

    def finished(self, request: Request) -> None:
        """Nothing is learned."""

    def progressed(self, request: Request) -> None:
        """Nothing is learned."""
