# SPDX-License-Identifier: Apache-2.0
"""Ask instances to bring the KV of requests that run next from the pool's SSD tier to DRAM.

The scheduler says which requests and where (seer.scheduling.look_ahead). The rollout loop calls this after it has
started what fits, in production and in the simulator alike. It is a hint: nothing waits for it, and none is lost that
matters.

Invariant: an instance is asked once for the KV that a request has.
"""

from __future__ import annotations

from collections.abc import Sequence

from seer.buffer import chunk_of
from seer.engine.base import Instance, PrefetchingInstance
from seer.fleet import Fleet
from seer.scheduling.base import LooksAhead, Scheduler


class Prefetcher:
    """Remembers what has been asked for."""

    def __init__(self, scheduler: Scheduler, instances: Sequence[Instance], weights_version: int) -> None:
        self._scheduler = scheduler if isinstance(scheduler, LooksAhead) else None
        self._instances = instances
        self._weights_version = weights_version
        self._asked: dict[int, int] = {}  # request -> tokens that it had

    def forget(self, request: int) -> None:
        """It has ended."""
        self._asked.pop(request, None)

    def look_ahead(self, fleet: Fleet) -> None:
        """Ask for the KV of the requests that the scheduler will start next."""
        if self._scheduler is None:
            return
        for request, instance in self._scheduler.upcoming(fleet):
            asked = self._instances[instance]
            if isinstance(asked, PrefetchingInstance) and self._asked.get(request.id) != request.num_tokens:
                self._asked[request.id] = request.num_tokens
                asked.prefetch(chunk_of(request, self._weights_version, request.remaining_limit))
