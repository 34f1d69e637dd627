"""Context-aware ordering, as in the paper (Alg. 2): probes shortest first, then the longest group first.

One request per group is its probe. Probes go before all others, the one with the fewest tokens so far first: short
groups are told apart quickly and long ones stay in view. Once every probe is in flight or done, the others are taken
from the group with the longest estimate; ties go to the group that was granted the least, then to the request that is
further along. Now and then the group with the least service is served out of order, so that none starves.

Invariants
  1. No other request is shown while a probe waits.
  2. Of two waiting groups the one with the larger estimate is shown first, but for one decision in `starvation_period`.
  3. Each operation costs O(log n): stale heap entries are skipped when they surface.
"""

from __future__ import annotations

import heapq

from seer.buffer import Request
from seer.context import Context
from seer.types import Group


class ProbesThenLongestGroup:
    """The paper's ordering over a `Context` of length estimates."""

    def __init__(self, context: Context, *, starvation_period: int = 64) -> None:
        self._context = context
        self._starvation_period = starvation_period
        """One decision in so many goes to the least served group; 0 turns the guard off."""
        self._num_decisions = 0
        self._probes: list[tuple[int, int, Request]] = []
        self._members: dict[int, list[tuple[int, int, Request]]] = {}  # group -> heap, furthest along first
        self._groups: dict[int, Group] = {}
        self._by_length: list[tuple[int, int, int]] = []  # (-estimate, service, group)
        self._by_service: list[tuple[int, int]] = []

    def push(self, request: Request) -> None:
        """The request waits."""
        if request.is_probe:
            heapq.heappush(self._probes, (request.num_generated, request.id, request))
            return
        group = request.group
        self._groups[group.id] = group
        heapq.heappush(self._members.setdefault(group.id, []), (-request.num_generated, request.id, request))
        self._refresh(group)

    def peek(self) -> Request | None:
        """The waiting probe with the fewest tokens; else the furthest request of the chosen group."""
        if self._probes:
            return self._probes[0][2]
        group = self._chosen_group()
        return None if group is None else self._members[group][0][2]

    def pop(self) -> Request:
        """Take the request that `peek` showed."""
        if self._probes:
            return heapq.heappop(self._probes)[2]
        group = self._chosen_group()
        assert group is not None, "pop without a waiting request"
        self._num_decisions += 1
        return heapq.heappop(self._members[group])[2]

    def granted(self, request: Request, num_tokens: int) -> None:
        """Count the service, which moves the group among its equals."""
        self._context.grant(request, num_tokens)
        if self._members.get(request.group.id):
            self._refresh(request.group)

    def finished(self, request: Request) -> None:
        """The group's estimate may have moved."""
        if self._members.get(request.group.id):
            self._refresh(request.group)

    def _chosen_group(self) -> int | None:
        period = self._starvation_period
        if period and self._num_decisions % period == period - 1:
            return self._top_by_service()
        return self._top_by_length()

    def _refresh(self, group: Group) -> None:
        service = self._context.service_tokens(group)
        heapq.heappush(self._by_length, (-self._context.expected_tokens(group), service, group.id))
        heapq.heappush(self._by_service, (service, group.id))

    def _top_by_length(self) -> int | None:
        while self._by_length:
            minus_estimate, service, group = self._by_length[0]
            current = self._groups[group]
            fresh = -minus_estimate == self._context.expected_tokens(current)
            if fresh and service == self._context.service_tokens(current) and self._members[group]:
                return group
            heapq.heappop(self._by_length)
        return None

    def _top_by_service(self) -> int | None:
        while self._by_service:
            service, group = self._by_service[0]
            if service == self._context.service_tokens(self._groups[group]) and self._members[group]:
                return group
            heapq.heappop(self._by_service)
        return None
