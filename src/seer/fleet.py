# SPDX-License-Identifier: Apache-2.0
"""The books of a fleet: the KV blocks and requests promised on each instance.

Instances may differ in their limits, come and go. Only the block size is one for all: KV moves between them in blocks.

Invariants
  1. Promised blocks never exceed an instance's blocks, so no instance has to preempt. Schedulers that overcommit are
     the exception: they leave memory to the engine.
  2. Every promise is given back exactly once.
  3. Sums over the fleet (`free_tokens`, `kv_tokens`, `max_num_seqs`) count the instances that can be given work.
  4. The longest request is one that an instance holds which has not been retired: a lost one may come back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from seer.buffer import Request
from seer.errors import ConfigError
from seer.node_books import Node, NodeBooks
from seer.types import InstanceLimits


class Promise(msgspec.Struct, gc=False):
    """What an instance holds for a request."""

    instance: int
    num_blocks: int
    shared_blocks: int
    prompt: int
    """The group that stands for all with an equal prompt."""


class Fleet:
    """The KV blocks and in-flight requests promised on each instance."""

    def __init__(self, limits: Sequence[InstanceLimits], nodes: Sequence[Node] | None = None) -> None:
        """`nodes` names the node of each instance; without it all are on one."""
        if not limits:
            raise ConfigError("a rollout needs at least one instance, got 0", hint="--instances 1 or more")
        self.block_size = limits[0].block_size
        self.limits: list[InstanceLimits] = []
        self.is_uniform = True
        """Whether all instances have the same limits."""
        self.kv_tokens = self.max_num_seqs = 0
        self.longest_request_tokens = 0
        """Prompt and response tokens of the longest request that one of the instances can hold."""
        self._retired: set[int] = set()
        self._free: list[int] = []
        self._in_flight: list[int] = []
        self._free_tokens = 0
        self._promise: dict[int, Promise] = {}  # by request
        self._sharers: dict[tuple[int, int], int] = {}  # (instance, prompt) -> requests that share its blocks
        self._num_with_prompt: dict[tuple[int, int], int] = {}  # (instance, prompt) -> requests in flight with it
        self._alive: list[bool] = []
        # Kept sorted, so that the extremes are at the ends and a change costs two bisections. An entry is an integer,
        # amount * _radix + instance: bisecting integers takes half the time of bisecting pairs.
        self._radix = 1
        self._by_load: list[int] = []
        self._by_free: list[int] = []
        self._prompt_home: dict[int, int] = {}  # prompt -> instance that computed it last
        self.nodes = NodeBooks()
        self._enter(limits, nodes or [None] * len(limits))

    def add(self, limits: InstanceLimits, node: Node = None) -> int:
        """Take a new instance in, which can be given work at once; returns its id."""
        self._enter([limits], [node])
        return len(self) - 1

    def _enter(self, limits: Sequence[InstanceLimits], nodes: Sequence[Node]) -> None:
        for one, node in zip(limits, nodes, strict=True):
            self._refuse_other_blocks(one)
            self.nodes.place(len(self.limits), node)
            self.limits.append(one)
            self._free.append(one.kv_blocks)
            self._in_flight.append(0)
            self._alive.append(True)
            self._count(one, one.kv_blocks, 1)
        self._compare_limits()
        self._radix = len(self.limits)
        living = [instance for instance, alive in enumerate(self._alive) if alive]
        self._by_load = sorted(self._in_flight[i] * self._radix + i for i in living)
        self._by_free = sorted(self._free[i] * self._radix + i for i in living)

    def _refuse_other_blocks(self, limits: InstanceLimits) -> None:
        if limits.block_size != self.block_size:
            raise ConfigError(
                f"instances with blocks of {self.block_size} and of {limits.block_size} tokens cannot share KV",
                hint="start all instances with one block size",
            )

    def _compare_limits(self) -> None:
        """Instances have come, gone or changed."""
        self.is_uniform = all(one == self.limits[0] for one in self.limits)
        staying = [one for instance, one in enumerate(self.limits) if instance not in self._retired]
        self.longest_request_tokens = max((min(one.kv_tokens, one.max_model_len) for one in staying), default=0)

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

    def has_room(self, instance: int, num_blocks: int, num_tokens: int = 0) -> bool:
        """Whether one more request can be promised to the instance: of so many blocks, and of tokens where given."""
        limits = self.limits[instance]
        return (
            self._alive[instance]
            and self._free[instance] >= num_blocks
            and self._in_flight[instance] < limits.max_num_seqs
            and num_tokens <= limits.max_model_len
        )

    def least_loaded(self, num_blocks: int | None = None, num_tokens: int = 0) -> int | None:
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
            if self.has_room(entry % radix, num_blocks, num_tokens):
                return entry % radix
            instance = by_free[-step] % radix
            load = self._in_flight[instance] * radix + instance
            if (best is None or load < best) and self.has_room(instance, num_blocks, num_tokens):
                best = load
        return best % radix if best is not None else None

    def least_loaded_for(self, num_tokens: int) -> int | None:
        """The instance with the fewest in-flight requests that serves requests of this many tokens."""
        if self.is_uniform:
            return self.least_loaded()
        order = (entry % self._radix for entry in self._by_load)
        return next((i for i in order if num_tokens <= self.limits[i].max_model_len), None)

    @property
    def free_tokens(self) -> int:
        """Tokens of KV that are not promised, over all living instances; negative if overcommitted."""
        return self._free_tokens

    def candidates(self, num_blocks: int, each_end: int, num_tokens: int = 0) -> list[int]:
        """Instances with room: the `each_end` fullest that fit and the `each_end` emptiest; all if they are few."""
        by_free, radix = self._by_free, self._radix
        if not by_free or by_free[-1] < num_blocks * radix:
            return []
        in_flight, limits = self._in_flight, self.limits
        first = bisect_left(by_free, num_blocks * radix)
        if not self.is_uniform:
            by_free = [entry for entry in by_free[first:] if num_tokens <= limits[entry % radix].max_model_len]
            first = 0
        are_many = len(by_free) - first > 2 * each_end
        fits = by_free[first : first + each_end] + by_free[-each_end:] if are_many else by_free[first:]
        return [i for entry in fits if in_flight[i := entry % radix] < limits[i].max_num_seqs]

    def promise(
        self, request: Request, instance: int, num_blocks: int, *, overcommit: bool = False, shared_blocks: int = 0
    ) -> None:
        """Reserve blocks for a chunk. `overcommit` is for schedulers that leave memory to the engine, as verl's do.

        Of the blocks, `shared_blocks` are counted once for all requests of the group on that instance.
        """
        assert request.id not in self._promise, f"{request} holds a promise already"
        prompt = request.group.same_prompt_as
        more = num_blocks - self.shared_here(request, instance, shared_blocks)
        assert overcommit or self._free[instance] >= more, (
            f"instance {instance} has {self._free[instance]} free blocks, {more} promised for {request}"
        )
        self._promise[request.id] = Promise(instance, num_blocks, shared_blocks, prompt)
        if shared_blocks:
            self._sharers[instance, prompt] = self._sharers.get((instance, prompt), 0) + 1
        self._num_with_prompt[instance, prompt] = self._num_with_prompt.get((instance, prompt), 0) + 1
        self._prompt_home[prompt] = instance
        self._move(instance, more, 1)

    def shared_here(self, request: Request, instance: int, shared_blocks: int) -> int:
        """Of the blocks that siblings share, those that an instance holds already."""
        return shared_blocks if shared_blocks and (instance, request.group.same_prompt_as) in self._sharers else 0

    def extend(self, requests: Iterable[tuple[Request, int]]) -> None:
        """Reserve this many blocks in all for requests that hold a promise already; never fewer than before."""
        more_on: dict[int, int] = {}
        for request, num_blocks in requests:
            held = self._promise[request.id]
            instance, more = held.instance, num_blocks - held.num_blocks
            assert more >= 0, f"{request} holds {held.num_blocks} blocks and cannot be reduced to {num_blocks}"
            held.num_blocks = num_blocks
            more_on[instance] = more_on.get(instance, 0) + more
        for instance, more in more_on.items():
            assert more <= max(0, self._free[instance]), (
                f"instance {instance} has {self._free[instance]} free blocks, {more} more are to be promised"
            )
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
        self.nodes.left(request.id, self._promise[request.id].instance, request.num_tokens)
        self._give_back(request.id)

    def _give_back(self, request: int) -> None:
        held = self._promise.pop(request)
        freed = held.num_blocks
        key = (held.instance, held.prompt)
        self._num_with_prompt[key] -= 1
        if not self._num_with_prompt[key]:
            del self._num_with_prompt[key]
        if held.shared_blocks:
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
        self._take_out(instance)
        return lost

    def retire(self, instance: int) -> None:
        """Give the instance no more work, for good; what it runs keeps its promises until it leaves."""
        self._retired.add(instance)
        self._take_out(instance)
        self._compare_limits()

    def _take_out(self, instance: int) -> None:
        if not self._alive[instance]:
            return
        self._remove(instance)
        self._alive[instance] = False
        self._count(self.limits[instance], -self._free[instance], -1)
        self._prompt_home = {prompt: where for prompt, where in self._prompt_home.items() if where != instance}

    def forget(self, prompt: int) -> None:
        """No more requests with this prompt come."""
        self._prompt_home.pop(prompt, None)

    def join(self, instance: int, limits: InstanceLimits) -> None:
        """The instance is ready for work again, with empty KV memory, and with the limits of where it now runs."""
        assert not self._alive[instance], f"instance {instance} is in the fleet already"
        self._refuse_other_blocks(limits)
        self._free[instance] += limits.kv_blocks - self.limits[instance].kv_blocks
        self.limits[instance] = limits
        self._retired.discard(instance)
        self._compare_limits()
        self._alive[instance] = True
        self._count(self.limits[instance], self._free[instance], 1)
        insort(self._by_load, self._in_flight[instance] * self._radix + instance)
        insort(self._by_free, self._free[instance] * self._radix + instance)

    def near_tokens(self, request: Request, instance: int) -> int:
        """Leading tokens of the request whose KV the instance's node holds; 0 where all are on one node."""
        return self.nodes.near_tokens(request.id, instance)

    def prompt_home(self, request: Request) -> int | None:
        """An instance that computed this request's prompt, if it is alive."""
        return self._prompt_home.get(request.group.same_prompt_as)

    def holds_prompt(self, request: Request, instance: int) -> bool:
        """Whether the instance surely has the KV of this request's prompt: a request with it is in flight there."""
        return (instance, request.group.same_prompt_as) in self._num_with_prompt

    def blocks(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens of one request."""
        return -(-num_tokens // self.block_size)

    def check(self) -> None:
        """Assert the invariants; linear in the promises, for tests."""
        for instance, limit in enumerate(self.limits):
            here = [held for held in self._promise.values() if held.instance == instance]
            shared = {held.prompt: held.shared_blocks for held in here}
            promised = sum(held.num_blocks - held.shared_blocks for held in here) + sum(shared.values())
            assert self._free[instance] == limit.kv_blocks - promised, f"instance {instance} miscounts its blocks"
            assert self._in_flight[instance] == len(here), f"instance {instance} miscounts its requests"
        counts = Counter((held.instance, held.prompt) for held in self._promise.values())
        assert counts == self._num_with_prompt, "requests with a prompt miscounted"
        living = [instance for instance in range(len(self)) if self._alive[instance]]
        free_tokens = sum(self._free[i] * self.limits[i].block_size for i in living)
        assert self._free_tokens == free_tokens, f"{self._free_tokens} tokens counted free, {free_tokens} are"
        assert self.kv_tokens == sum(self.limits[i].kv_tokens for i in living), "memory of the fleet miscounted"
        assert self.max_num_seqs == sum(self.limits[i].max_num_seqs for i in living), "slots of the fleet miscounted"
        assert self.is_uniform == (len(set(self.limits)) == 1), "unlike instances taken for equal ones"
        longest = max((min(self.limits[i].kv_tokens, self.limits[i].max_model_len) for i in living), default=0)
        assert self.longest_request_tokens >= longest, f"a request of {longest} tokens would be refused"
        loads = [divmod(entry, self._radix) for entry in self._by_load]
        assert loads == sorted((self._in_flight[i], i) for i in living), "load order is stale"
        memory = [divmod(entry, self._radix) for entry in self._by_free]
        assert memory == sorted((self._free[i], i) for i in living), "memory order is stale"

    def _move(self, instance: int, num_blocks: int, num_requests: int) -> None:
        free, in_flight, radix = self._free[instance], self._in_flight[instance], self._radix
        self._free[instance] = free - num_blocks
        self._in_flight[instance] = in_flight + num_requests
        if not self._alive[instance]:
            return
        self._free_tokens -= num_blocks * self.block_size
        by_free = self._by_free
        del by_free[bisect_left(by_free, free * radix + instance)]
        insort(by_free, (free - num_blocks) * radix + instance)
        if num_requests:  # the many extensions change only memory
            del self._by_load[bisect_left(self._by_load, in_flight * radix + instance)]
            insort(self._by_load, (in_flight + num_requests) * radix + instance)

    def _count(self, limits: InstanceLimits, free_blocks: int, sign: int) -> None:
        self._free_tokens += free_blocks * self.block_size
        self.kv_tokens += sign * limits.kv_tokens
        self.max_num_seqs += sign * limits.max_num_seqs

    def _remove(self, instance: int) -> None:
        del self._by_load[bisect_left(self._by_load, self._in_flight[instance] * self._radix + instance)]
        del self._by_free[bisect_left(self._by_free, self._free[instance] * self._radix + instance)]
