# SPDX-License-Identifier: Apache-2.0
"""Where a chunk runs: the KV blocks promised on each instance, and the choice of an instance.

A scheduler says which request is next; this module says where it fits.

The paper's rule: an instance is a candidate if it can hold the request's KV at the chunk's *end*. While the load is
balanced, take the candidate that already holds the longest prefix of the request; once the spread of in-flight
requests exceeds a threshold, take the least loaded. The paper pulls KV that the chosen instance lacks if it is more
than a margin of tokens, and computes it otherwise (`PlacementConfig.as_in_the_paper`). Without a margin, the faster of
the two by measured costs is chosen (seer.transfer). Both hold for the request's last instance too, which may have
dropped its KV while it waited.

Invariants
  1. Promised blocks never exceed an instance's blocks, so no instance has to preempt. Schedulers that overcommit are
     the exception: they leave memory to the engine.
  2. Every promise is given back exactly once.
  3. Equal inputs give equal placements: ties break on instance id.
  4. A decision looks at few instances as long as few have room, or one of the least loaded has.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from seer.buffer import Request
from seer.errors import ConfigError
from seer.transfer import Gap, TransferEstimate, plan_transfer
from seer.types import InstanceLimits

PAPER_IMBALANCE = 32
"""Spread of in-flight requests up to which the paper's placement counts as balanced."""
PAPER_PULL_MARGIN_TOKENS = 512
"""Missing tokens up to which the paper's placement computes KV again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """When cached KV decides, when load decides, and what moving KV costs."""

    imbalance_threshold: int = PAPER_IMBALANCE
    """Spread of in-flight requests up to which the longest cached prefix decides."""
    transfer: TransferEstimate | None = field(default_factory=TransferEstimate)
    """Costs of moving and of computing KV; None without a pool: missing KV is then always computed."""
    pull_margin_tokens: int | None = None
    """More missing tokens than this are pulled, fewer are computed; None: whichever is faster by `transfer`."""

    def as_in_the_paper(self) -> PlacementConfig:
        """The paper's threshold and margin, with the same pool."""
        return replace(self, imbalance_threshold=PAPER_IMBALANCE, pull_margin_tokens=PAPER_PULL_MARGIN_TOKENS)


class Place(msgspec.Struct, frozen=True, gc=False):
    """An instance for a chunk, and whether it loads the KV that it lacks from the pool."""

    instance: int
    load_kv: bool


class Promise(NamedTuple):
    """What an instance holds for a request."""

    instance: int
    num_blocks: int
    shared_blocks: int
    group: int


class Fleet:
    """The KV blocks and in-flight requests promised on each instance."""

    def __init__(self, limits: Sequence[InstanceLimits]) -> None:
        if not limits:
            raise ConfigError("a rollout needs at least one instance, got 0", hint="--instances 1 or more")
        self.limits = list(limits)
        self._free = [limit.kv_blocks for limit in limits]
        self._in_flight = [0] * len(limits)
        self._free_tokens = sum(limit.kv_tokens for limit in limits)
        self._promise: dict[int, Promise] = {}  # by request
        self._sharers: dict[tuple[int, int], int] = {}  # (instance, group) -> requests that share their prompt's blocks
        self._alive = [True] * len(limits)
        # Kept sorted, so that the extremes are at the ends and a change costs two bisections. An entry is an integer,
        # amount * _radix + instance: bisecting integers takes half the time of bisecting pairs.
        self._radix = len(limits)
        self._by_load = list(range(len(limits)))
        self._by_free = sorted(free * self._radix + instance for instance, free in enumerate(self._free))
        self._prompt_home: dict[int, int] = {}  # group -> instance that computed its prompt last

    def __len__(self) -> int:
        return len(self.limits)

    @property
    def num_alive(self) -> int:
        """Instances that can be given work."""
        return len(self._by_load)

    @property
    def spread(self) -> int:
        """Most minus fewest in-flight requests over the instances."""
        by_load, radix = self._by_load, self._radix
        return by_load[-1] // radix - by_load[0] // radix if by_load else 0

    def alive(self, instance: int) -> bool:
        """Whether the instance can be given work."""
        return self._alive[instance]

    @property
    def in_flight(self) -> Sequence[int]:
        """By instance: requests promised to it and not given back."""
        return self._in_flight

    @property
    def free_blocks(self) -> Sequence[int]:
        """By instance: blocks that are not promised."""
        return self._free

    def has_room(self, instance: int, num_blocks: int) -> bool:
        """Whether one more request of this size can be promised to the instance."""
        return (
            self._alive[instance]
            and self._free[instance] >= num_blocks
            and self._in_flight[instance] < self.limits[instance].max_num_seqs
        )

    def least_loaded(self, num_blocks: int | None = None) -> int | None:
        """The instance with the fewest in-flight requests, among those with room where blocks are given."""
        by_load, by_free, radix = self._by_load, self._by_free, self._radix
        if num_blocks is None:
            return by_load[0] % radix if by_load else None
        # Two searches in step, so that the shorter one sets the cost: up the order of load to the first with room, and
        # through all that have the memory. On a full fleet few have it, and they may be anywhere in the order of load.
        best: int | None = None
        for step, entry in enumerate(by_load, start=1):
            if by_free[-step] < num_blocks * radix:  # all that have the memory were seen
                break
            if self.has_room(entry % radix, num_blocks):
                return entry % radix
            instance = by_free[-step] % radix
            load = self._in_flight[instance] * radix + instance
            if (best is None or load < best) and self.has_room(instance, num_blocks):
                best = load
        return best % radix if best is not None else None

    @property
    def free_tokens(self) -> int:
        """Tokens of KV that are not promised, over all living instances; negative if overcommitted."""
        return self._free_tokens

    def candidates(self, num_blocks: int, each_end: int) -> list[int]:
        """Instances with room: the `each_end` fullest that fit and the `each_end` emptiest; all if they are few."""
        by_free, radix = self._by_free, self._radix
        if not by_free or by_free[-1] < num_blocks * radix:
            return []
        first = bisect_left(by_free, num_blocks * radix)
        if len(by_free) - first > 2 * each_end:
            fits = by_free[first : first + each_end] + by_free[-each_end:]
        else:
            fits = by_free[first:]
        in_flight, limits = self._in_flight, self.limits
        return [i for entry in fits if in_flight[i := entry % radix] < limits[i].max_num_seqs]

    def promise(
        self, request: Request, instance: int, num_blocks: int, *, overcommit: bool = False, shared_blocks: int = 0
    ) -> None:
        """Reserve blocks for a chunk. `overcommit` is for schedulers that leave memory to the engine, as verl's do.

        Of the blocks, `shared_blocks` are counted once for all requests of the group on that instance.
        """
        assert request.id not in self._promise, f"{request} holds a promise already"
        group = request.group.id
        more = num_blocks - self.shared_here(request, instance, shared_blocks)
        assert overcommit or self._free[instance] >= more, (
            f"instance {instance} has {self._free[instance]} free blocks, {more} promised for {request}"
        )
        self._promise[request.id] = Promise(instance, num_blocks, shared_blocks, group)
        if shared_blocks:
            self._sharers[instance, group] = self._sharers.get((instance, group), 0) + 1
        self._prompt_home[group] = instance
        self._move(instance, more, 1)

    def shared_here(self, request: Request, instance: int, shared_blocks: int) -> int:
        """Of the blocks that siblings share, those that an instance holds already."""
        return shared_blocks if shared_blocks and (instance, request.group.id) in self._sharers else 0

    def extend(self, request: Request, num_blocks: int) -> None:
        """Reserve this many blocks in all for a request that holds a promise already; never fewer than before."""
        held = self._promise[request.id]
        instance, more = held.instance, num_blocks - held.num_blocks
        assert 0 <= more <= max(0, self._free[instance]), (
            f"instance {instance} has {self._free[instance]} free blocks, {more} more for {request}"
        )
        if more:
            self._promise[request.id] = held._replace(num_blocks=num_blocks)
            self._move(instance, more, 0)

    def promised_blocks(self, request: Request) -> int:
        """Blocks reserved for a request in flight, shared ones included."""
        return self._promise[request.id].num_blocks

    def own_blocks(self, request: Request) -> int:
        """Blocks that come back when it leaves, even if siblings stay."""
        held = self._promise[request.id]
        return held.num_blocks - held.shared_blocks

    def give_back(self, request: Request) -> None:
        """The chunk has ended: its blocks are free again."""
        self._give_back(request.id)

    def _give_back(self, request: int) -> None:
        held = self._promise.pop(request)
        freed = held.num_blocks
        if held.shared_blocks:
            key = (held.instance, held.group)
            self._sharers[key] -= 1
            if self._sharers[key]:
                freed -= held.shared_blocks
            else:
                del self._sharers[key]
        self._move(held.instance, -freed, -1)

    def lose(self, instance: int) -> list[int]:
        """Take a lost instance out of the fleet; returns its requests, whose promises end."""
        lost = [request for request, held in self._promise.items() if held.instance == instance]
        for request in lost:
            self._give_back(request)
        self._remove(instance)
        self._alive[instance] = False
        self._free_tokens -= self._free[instance] * self.limits[instance].block_size
        self._prompt_home = {group: where for group, where in self._prompt_home.items() if where != instance}
        return lost

    def join(self, instance: int) -> None:
        """The instance is ready for work again, with empty KV memory."""
        assert not self._alive[instance], f"instance {instance} is in the fleet already"
        self._alive[instance] = True
        self._free_tokens += self._free[instance] * self.limits[instance].block_size
        insort(self._by_load, self._in_flight[instance] * self._radix + instance)
        insort(self._by_free, self._free[instance] * self._radix + instance)

    def prompt_home(self, request: Request) -> int | None:
        """An instance that computed this group's prompt, if it is alive."""
        return self._prompt_home.get(request.group.id)

    def check(self) -> None:
        """Assert the invariants; linear in the promises, for tests."""
        for instance, limit in enumerate(self.limits):
            here = [held for held in self._promise.values() if held.instance == instance]
            shared = {held.group: held.shared_blocks for held in here}
            promised = sum(held.num_blocks - held.shared_blocks for held in here) + sum(shared.values())
            assert self._free[instance] == limit.kv_blocks - promised, f"instance {instance} miscounts its blocks"
            assert self._in_flight[instance] == len(here), f"instance {instance} miscounts its requests"
        living = [instance for instance in range(len(self)) if self._alive[instance]]
        free_tokens = sum(self._free[i] * self.limits[i].block_size for i in living)
        assert self._free_tokens == free_tokens, f"{self._free_tokens} tokens counted free, {free_tokens} are"
        loads = [divmod(entry, self._radix) for entry in self._by_load]
        assert loads == sorted((self._in_flight[i], i) for i in living), "load order is stale"
        memory = [divmod(entry, self._radix) for entry in self._by_free]
        assert memory == sorted((self._free[i], i) for i in living), "memory order is stale"

    def _move(self, instance: int, num_blocks: int, num_requests: int) -> None:
        alive = self._alive[instance]
        if alive:
            self._remove(instance)
        self._free[instance] -= num_blocks
        self._free_tokens -= num_blocks * self.limits[instance].block_size
        self._in_flight[instance] += num_requests
        if alive:
            insort(self._by_load, self._in_flight[instance] * self._radix + instance)
            insort(self._by_free, self._free[instance] * self._radix + instance)

    def _remove(self, instance: int) -> None:
        del self._by_load[bisect_left(self._by_load, self._in_flight[instance] * self._radix + instance)]
        del self._by_free[bisect_left(self._by_free, self._free[instance] * self._radix + instance)]


def place(request: Request, chunk_tokens: int, fleet: Fleet, config: PlacementConfig) -> Place | None:
    """The instance for the request's next chunk, or None if no instance has the memory now."""
    num_blocks = fleet.limits[0].blocks(request.num_tokens + chunk_tokens)
    home = request.last_instance if request.last_instance is not None else fleet.prompt_home(request)
    instance: int | None
    if home is not None and fleet.spread <= config.imbalance_threshold and fleet.has_room(home, num_blocks):
        instance = home
    else:
        instance = fleet.least_loaded(num_blocks)
    if instance is None:
        return None
    return Place(instance, loads_kv(request, instance, fleet, config))


def loads_kv(request: Request, instance: int, fleet: Fleet, config: PlacementConfig) -> bool:
    """Whether the KV that the instance lacks is loaded from the pool rather than computed.

    The request's last instance may hold all of its KV, and then loads nothing, or may have dropped all of it since; so
    it is priced like any other. A request that has generated nothing has no KV in the pool.
    """
    if config.transfer is None or not request.num_generated:
        return False
    held = request.group.num_prompt_tokens if fleet.prompt_home(request) == instance else 0
    missing = request.num_tokens - held
    if config.pull_margin_tokens is not None:
        return missing > config.pull_margin_tokens
    costs = config.transfer.costs
    gap = Gap(
        first_token=held,
        num_tokens=missing,
        num_pooled_tokens=missing,
        bytes_per_token=costs.bytes_per_token,
        block_size=fleet.limits[instance].block_size,
    )
    return plan_transfer(gap, costs.move, costs.prefill).move_tokens > 0
