# SPDX-License-Identifier: Apache-2.0
"""Who stays on its instance and who leaves, while requests run under leases.

A request takes memory as it grows. The memory up to the end of its lease is reserved, so a lease is short while memory
is scarce. It is extended when it runs low, ahead of time, so a request that stays never stops. When an instance
cannot extend all, the requests of most value are extended first, and the one of least value is parked until the rest
can stay. When no request waits, requests move from crowded instances to emptier ones. While sequence slots are scarce,
a request of a group that has turned out short makes place for one that may become far longer; where many responses end
at their limit, one that has come far makes place for one that has not.

Invariants
  1. What is granted to an instance never exceeds its free blocks.
  2. A request is asked to leave once; nothing is granted to it from then on.
  3. The last request of an instance is never parked for memory: alone, it has all of it.
  4. A request leaves its slot only to one that its instance can hold then, and one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from seer.buffer import Request
from seer.fleet import Fleet
from seer.scheduling.base import Extension, Renewal
from seer.scheduling.divided import Ordering
from seer.scheduling.fixed_rank import Rank

LEASE_TOKENS = 64
"""Shortest lease: twice `LOW_LEASE_TOKENS`."""
LEASES_AT_MOST = 256
"""A response of full length has about so many leases: where responses are long, short leases only cost messages."""
CONTEXT_PER_LEASE = 20
"""Context tokens per token of a lease while memory is scarce: of long contexts about a fortieth of the reserved memory
is unused. Shorter leases cost messages, longer ones throughput: up to 1% of it at 6."""
RESERVE_TOKENS = 8
"""Free memory per running request that a new one must leave: otherwise it would push out one that just started."""
UNEVEN_SHARE, UNEVEN_REQUESTS = 0.25, 3
"""An instance is crowded if it has this share, and this many requests, more than the emptiest one."""
YIELD_RATIO = 2.0
"""A request leaves its slot to one that is expected to need more than this many times as many tokens. Results depend
little on it from 1.5 to 4; at 1 requests of like needs would take turns."""


class RankedOrdering(Ordering, Protocol):
    """An ordering that can compare a running request with a waiting one."""

    def rank(self, request: Request) -> Rank:
        """Smaller ranks run first."""

    def last_first(self, requests: Sequence[Request]) -> Iterator[Request]:
        """From the largest rank down; nothing that ranks depend on may change while it is read."""


class Tenants:
    """The requests in flight by instance, and which of them were asked to leave."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, Request]] = {}
        self._home: dict[int, int] = {}
        self._leaving: set[int] = set()

    def enter(self, request: Request, instance: int) -> None:
        """A chunk of it starts there."""
        self._of.setdefault(instance, {})[request.id] = request
        self._home[request.id] = instance

    def leave(self, request: Request) -> None:
        """Its chunk has ended; ignored if none runs."""
        instance = self._home.pop(request.id, None)
        if instance is not None:
            del self._of[instance][request.id]
            self._leaving.discard(request.id)

    def staying(self, instance: int) -> list[Request]:
        """Those on an instance that were not asked to leave."""
        leaving = self._leaving
        return [request for number, request in self._of.get(instance, {}).items() if number not in leaving]

    def ask_to_leave(self, request: Request) -> None:
        """It is parked: it leaves with the next step."""
        self._leaving.add(request.id)

    def is_leaving(self, request: Request) -> bool:
        """Whether it was asked to leave."""
        return request.id in self._leaving

    def blocks_leaving(self, instance: int, fleet: Fleet) -> int:
        """Blocks that come back when those that were asked to leave have left."""
        here = self._of.get(instance, {})
        return sum(fleet.own_blocks(here[request]) for request in self._leaving & here.keys())


class LeaseRenewal:
    """Decides for each instance which leases are extended and who is parked."""

    def __init__(
        self,
        tenants: Tenants,
        *,
        ordering: RankedOrdering,
        more_tokens: Callable[[Sequence[Request], Fleet], list[int]],
        remaining_tokens: Callable[[Request], float],
        may_park: bool,
    ) -> None:
        """`ordering` orders requests by value, most first; `more_tokens` is what each request that stays is given;
        `remaining_tokens` estimates what a request still needs.
        """
        self._tenants, self._ordering, self._more_tokens, self._may_park = tenants, ordering, more_tokens, may_park
        self._remaining_tokens = remaining_tokens
        self._yielding: Request | None = None

    def renew(
        self, low: Sequence[Request], fleet: Fleet, *, may_move: bool, for_a_slot: Request | None = None
    ) -> Renewal:
        """Move, extend what fits, the most valued first, and park where it does not fit.

        `for_a_slot` waits for a sequence slot; a request that needs far less may leave it one.
        """
        extended: list[Extension] = []
        parked = self._move(low, fleet) if may_move and self._may_park else []
        if for_a_slot is not None and self._may_park:
            parked += self._yield_slot(low, for_a_slot, fleet)
        by_instance: dict[int, list[Request]] = {}
        for request in low:
            if request.instance is not None and not self._tenants.is_leaving(request):
                by_instance.setdefault(request.instance, []).append(request)
        for instance, requests in by_instance.items():
            plans = self._extensions(self._that_may_grow(requests, fleet), fleet)
            missing = self._grant(plans, fleet.free_blocks[instance], fleet, extended)
            if missing and self._may_park:
                parked += self._make_room(instance, missing, fleet)
        return Renewal(extended, parked)

    def _that_may_grow(self, requests: list[Request], fleet: Fleet) -> list[Request]:
        """Those whose instance serves requests that are longer than their lease; of the others another one may."""
        if fleet.is_uniform:
            return requests
        return [request for request in requests if self._most_tokens(request, fleet) > 0]

    def _extensions(self, requests: Sequence[Request], fleet: Fleet) -> list[Extension]:
        more_tokens = self._more_tokens(requests, fleet)
        if not fleet.is_uniform:
            pairs = zip(requests, more_tokens, strict=True)
            more_tokens = [min(more, self._most_tokens(request, fleet)) for request, more in pairs]
        size = fleet.block_size
        return [
            Extension(request, more, -(-(request.num_tokens + request.chunk_remaining + more) // size))
            for request, more in zip(requests, more_tokens, strict=True)
        ]

    @staticmethod
    def _most_tokens(request: Request, fleet: Fleet) -> int:
        assert request.instance is not None, f"{request} is not in flight"
        return fleet.limits[request.instance].max_model_len - request.num_tokens - request.chunk_remaining

    def _grant(self, plans: list[Extension], free: int, fleet: Fleet, extended: list[Extension]) -> int:
        """Append the extensions that fit into the free blocks; return the blocks that the others lack."""
        more = [plan.num_blocks - fleet.promised_blocks(plan.request) for plan in plans]
        if sum(more) <= free:
            extended += plans
            return 0
        missing = 0
        rank = self._ordering.rank
        for plan, blocks in sorted(zip(plans, more, strict=True), key=lambda pair: rank(pair[0].request)):
            if blocks <= free:
                free -= blocks
                extended.append(plan)
            else:
                missing += blocks
        return missing - free

    def _make_room(self, instance: int, num_blocks: int, fleet: Fleet) -> list[Request]:
        """Park the least valued until what they free, with what is on its way, covers the blocks."""
        num_blocks -= self._tenants.blocks_leaving(instance, fleet)
        if num_blocks <= 0:
            return []
        leaving: list[Request] = []
        staying = self._tenants.staying(instance)
        for request in islice(self._ordering.last_first(staying), len(staying) - 1):
            num_blocks -= fleet.own_blocks(request)
            self._tenants.ask_to_leave(request)
            leaving.append(request)
            if num_blocks <= 0:
                break
        return leaving

    def _yield_slot(self, low: Sequence[Request], longer: Request, fleet: Fleet) -> list[Request]:
        """Of the requests whose leases run low, the one that needs least, if it needs far less than the longer one."""
        emptiest = fleet.least_loaded()
        if emptiest is None or fleet.in_flight[emptiest] < fleet.limits[emptiest].max_num_seqs:
            return []  # one that has just ended has left a slot
        if self._yielding is not None and self._tenants.is_leaving(self._yielding):
            return []  # a slot is on its way
        self._yielding = None
        few = self._remaining_tokens(longer) / YIELD_RATIO
        for request in low:
            needs = self._remaining_tokens(request)
            if needs < few and not self._tenants.is_leaving(request) and self._fits_instead(longer, request, fleet):
                self._yielding, few = request, needs
        if self._yielding is None:
            return []
        self._tenants.ask_to_leave(self._yielding)
        return [self._yielding]

    @staticmethod
    def _fits_instead(longer: Request, request: Request, fleet: Fleet) -> bool:
        """Whether the request's instance can hold the longer one's first lease once it has left."""
        home = request.instance
        if home is None:
            return False
        num_tokens = longer.num_tokens + LEASE_TOKENS
        free = fleet.free_blocks[home] + fleet.own_blocks(request)
        return num_tokens <= fleet.limits[home].max_model_len and fleet.blocks(num_tokens) <= free

    def _move(self, low: Sequence[Request], fleet: Fleet) -> list[Request]:
        """Requests that would be faster on the emptiest instance; one of each crowded instance at a time."""
        emptiest = fleet.least_loaded()
        moved: dict[int, Request] = {}
        if len(fleet) == 1 or emptiest is None:
            return []
        in_flight = fleet.in_flight
        fewest = in_flight[emptiest]
        for request in low:
            home = request.instance
            if home is None or home in moved or self._tenants.is_leaving(request):
                continue
            num_here = in_flight[home]
            more = num_here - fewest - len(moved)
            if more >= UNEVEN_REQUESTS and more >= UNEVEN_SHARE * num_here:
                moved[home] = request
                self._tenants.ask_to_leave(request)
        return list(moved.values())
