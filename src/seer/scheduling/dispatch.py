# SPDX-License-Identifier: Apache-2.0
"""Schedulers that place each request once and run it whole, as current trainers do.

Every request is sent to one instance at the start and stays there. Engines manage memory and preempt when they run out.
The dispatchers differ in the instance that they choose, and in the order. Requests of a lost instance go to the least
loaded of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby

from seer.buffer import Request
from seer.fleet import Fleet
from seer.scheduling.base import Assignment, Renewal


class Dispatcher:
    """Base class: a queue of requests with the instances chosen for them."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Request, int | None]] = deque()

    def admit(self, requests: Sequence[Request], fleet: Fleet) -> None:
        """Choose an instance for every request."""
        self._queue.extend(self.dispatch(requests, fleet))

    def dispatch(self, requests: Sequence[Request], fleet: Fleet) -> list[tuple[Request, int | None]]:
        """Pair each request with an instance, in order of submission. None: the least loaded one when it is sent."""
        raise NotImplementedError

    def requeue(self, request: Request) -> None:
        """Queue a request of a lost instance for the least loaded one; after its tool, for the one that it was on."""
        self._queue.append((request, request.last_instance if request.num_fresh else None))

    def away(self, request: Request) -> None:
        """Nothing is kept of it while it is away."""

    def finished(self, request: Request) -> None:
        """Does nothing: lengths are not used."""

    def forget(self, family: int) -> None:
        """Does nothing: groups are not remembered."""

    def renew(self, low: Sequence[Request], fleet: Fleet) -> Renewal:
        """Does nothing: a request runs to its end."""
        return Renewal()

    def next(self, fleet: Fleet) -> Assignment | None:
        """The next request, whole, even if its instance lacks the memory."""
        while self._queue and self._queue[0][0].ended:  # cancelled while it waited
            self._queue.popleft()
        if not self._queue or not fleet.num_alive:
            return None
        request, instance = self._queue[0]
        longest_tokens = request.num_tokens + request.remaining_limit
        if instance is None or not fleet.alive(instance) or longest_tokens > fleet.limits[instance].max_model_len:
            instance = fleet.least_loaded_for(longest_tokens)
        if instance is None:
            return None
        self._queue.popleft()
        return Assignment(
            request,
            instance,
            request.remaining_limit,
            load_kv=False,
            num_blocks=fleet.blocks(request.num_tokens),
            overcommit=True,
        )


def by_group(requests: Sequence[Request]) -> list[list[Request]]:
    """The requests as groups, in order of arrival."""
    return [list(members) for _, members in groupby(requests, key=lambda request: request.group.id)]


class VerlSync(Dispatcher):
    """`verl-sync`: contiguous ranges of whole groups per instance, all submitted at once. The paper's baseline."""

    def dispatch(self, requests: Sequence[Request], fleet: Fleet) -> list[tuple[Request, int | None]]:
        """Group k of n goes to instance k*N//n of N."""
        groups = by_group(requests)
        return [
            (request, position * len(fleet) // len(groups))
            for position, members in enumerate(groups)
            for request in members
        ]


class Verl(Dispatcher):
    """`verl`: each request to the instance with the fewest in flight, where it stays. verl does this."""

    def dispatch(self, requests: Sequence[Request], fleet: Fleet) -> list[tuple[Request, int | None]]:
        """A later turn goes where the one before it was; for others the instance is chosen when they are sent."""
        return [(request, request.group.home) for request in requests]


class WholeGroup(Dispatcher):
    """`group`: each group, whole, to the instance with the fewest pending requests. OpenRLHF does this."""

    def dispatch(self, requests: Sequence[Request], fleet: Fleet) -> list[tuple[Request, int | None]]:
        """Greedy over groups in order of arrival."""
        pending = [0] * len(fleet)
        pairs: list[tuple[Request, int | None]] = []
        for members in by_group(requests):
            instance = min(range(len(pending)), key=lambda i: (pending[i], i))
            pending[instance] += len(members)
            pairs.extend((request, instance) for request in members)
        return pairs
