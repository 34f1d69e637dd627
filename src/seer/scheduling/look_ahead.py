# SPDX-License-Identifier: Apache-2.0
"""Which waiting requests run next, and where: so that their KV can leave the SSD before they need it.

Pure, like all decisions. The order is that of the scheduler's own queue, read without changing it. A request's probable
instance is its last one, or else the least loaded.

Invariants
  1. No more KV is named than the pool holds in DRAM for this purpose (`TransferCosts.prefetch_tokens`); without an SSD
     tier that is none, and nothing is looked at.
  2. A request is named only if its next chunk would load its KV rather than compute it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from seer.buffer import Request
from seer.fleet import Fleet
from seer.placement import PlacementConfig, loads_kv

MOST_AHEAD = 64
"""Requests looked at: more than start at the same moment on a few instances, and cheap."""
E = TypeVar("E", bound=tuple[object, ...])


class Upcoming(NamedTuple):
    """A waiting request, and the instance that it will probably run on."""

    request: Request
    instance: int


def look_ahead(waiting: Iterable[Request], fleet: Fleet, config: PlacementConfig) -> list[Upcoming]:
    """The first of the waiting requests whose KV is to be brought from SSD to DRAM now."""
    left = config.transfer.costs.prefetch_tokens if config.transfer is not None else 0
    if left <= 0:
        return []
    chosen = []
    for request in islice(waiting, MOST_AHEAD):
        instance = _probable_instance(request, fleet)
        if instance is None or not loads_kv(request, instance, fleet, config):
            continue
        left -= request.num_tokens
        if left < 0:
            break
        chosen.append(Upcoming(request, instance))
    return chosen


def in_heap_order(heap: Sequence[E]) -> Iterator[E]:
    """The entries of a heap from the smallest on, without changing it: O(log n) for each that is taken."""
    front = [(heap[0], 0)] if heap else []
    while front:
        entry, at = heapq.heappop(front)
        yield entry
        for child in (2 * at + 1, 2 * at + 2):
            if child < len(heap):
                heapq.heappush(front, (heap[child], child))


def _probable_instance(request: Request, fleet: Fleet) -> int | None:
    last = request.last_instance
    return last if last is not None and fleet.alive(last) else fleet.least_loaded()
