# SPDX-License-Identifier: Apache-2.0
"""Every ordering against its brute-force twin: a list that is searched for every call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_group, requests_of
from seer.buffer import Request
from seer.context import Context
from seer.scheduling.context_aware import ProbesThenLongestGroup
from seer.scheduling.divided import Ordering
from seer.scheduling.fixed_rank import FirstComeFirstServed
from seer.scheduling.longest_first import LongestRemainingFirst
from seer.scheduling.memory_or_slot import (
    LEVEL_RATIO,
    OVERRUN,
    MemoryOrSlotOrdering,
    expected_remaining_tokens,
)
from seer.spread import Spread


class SortedList:
    """The paper's ordering, written as its text describes it."""

    def __init__(self, context: Context, starvation_period: int) -> None:
        self._context = context
        self._period = starvation_period
        self._waiting: list[Request] = []
        self._num_decisions = 0

    def push(self, request: Request) -> None:
        self._waiting.append(request)

    def peek(self) -> Request | None:
        if not self._waiting:
            return None
        probes = [request for request in self._waiting if request.is_probe]
        if probes:
            return min(probes, key=lambda r: (r.num_generated, r.id))
        starving = self._period and self._num_decisions % self._period == self._period - 1

        def rank(r: Request) -> tuple[int, ...]:
            service = self._context.service_tokens(r.group)
            among_groups = (service,) if starving else (-self._context.expected_tokens(r.group), service)
            return (*among_groups, r.group.id, -r.num_generated, r.id)

        return min(self._waiting, key=rank)

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None
        if not request.is_probe:
            self._num_decisions += 1
        self._waiting.remove(request)
        return request


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    period=st.sampled_from([0, 2, 3, 64]),
    seed=st.integers(0, 2**32),
)
def test_probes_then_longest_group_is_the_sorted_list(sizes: list[int], period: int, seed: int) -> None:
    random = Random(seed)  # long programs: hypothesis alone writes short ones, in which no priority ever moves
    operations = [
        (random.choice(["take", "take", "stop", "stop", "finish"]), random.randrange(1000)) for _ in range(150)
    ]
    context = Context()
    fast = ProbesThenLongestGroup(context, starvation_period=period)
    slow = SortedList(context, period)
    requests = requests_of(*(a_group(id, size) for id, size in enumerate(sizes)))
    fast.admit(requests)
    for request in requests:
        slow.push(request)
    running: list[Request] = []
    for operation, number in operations:
        if operation == "take" and slow.peek() is not None:
            assert fast.peek() is slow.peek()
            request = fast.pop()
            assert request is slow.pop()
            fast.granted(request, number % 100 + 1)
            running.append(request)
        elif operation == "stop" and running:
            request = running.pop(number % len(running))
            request.num_generated += number % 50
            fast.push(request)
            slow.push(request)
        elif operation == "finish" and running:
            request = running.pop(number % len(running))
            request.num_generated += number
            context.observe_finished(request)
            fast.finished(request)
        assert fast.peek() is slow.peek()


Ranked = Callable[[Request], tuple[float, ...]]


def follow(
    ordering: Ordering,
    rank: Ranked,
    sizes: list[int],
    seed: int,
    context: Context | None = None,
    limits: Sequence[int] = (1000,),
) -> None:
    """Play a long random program: at each moment `peek` shows the waiting request of the smallest rank."""
    random = Random(seed)
    of_groups = cycle(limits)
    requests = requests_of(*(a_group(id, size, max_tokens=next(of_groups)) for id, size in enumerate(sizes)))
    arriving = [[r for r in requests if r.group.id % 2 == half] for half in (0, 1)]
    waiting: list[Request] = []
    running: list[Request] = []
    for _ in range(200):
        operation = random.choice(["take", "take", "take", "stop", "stop", "finish", "admit"])
        if operation == "admit" and arriving:
            batch = arriving.pop()
            ordering.admit(batch)
            waiting += batch
        elif operation == "take" and waiting:
            best = min(waiting, key=rank)
            assert ordering.pop() is best
            ordering.granted(best, 1)
            waiting.remove(best)
            running.append(best)
        elif operation in ("stop", "finish") and running:
            request = running.pop(random.randrange(len(running)))
            tokens = random.choice([0, 0, 5, random.randrange(200)])  # lost before its first token, or run a while
            request.num_generated = min(request.max_tokens, request.num_generated + tokens)
            if operation == "stop":
                ordering.push(request)
                waiting.append(request)
            else:
                if context is not None:
                    context.observe_finished(request)
                ordering.finished(request)
        assert ordering.peek() is (min(waiting, key=rank) if waiting else None)


SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=7)
RATIOS = st.sampled_from([1.0, 1.5, 4.0])
SEEDS = st.integers(0, 2**32)
BY_TURNS = st.sampled_from([(True,), (False,), (True, False)])


def level(remaining: float, ratio: float) -> float:
    return math.floor(math.log(max(1.0, remaining)) / math.log(ratio)) if ratio > 1 else max(1.0, remaining)


class Queue(FirstComeFirstServed):
    """Counts the turns once more, by itself."""

    def __init__(self, *, has_pool: bool) -> None:
        super().__init__(has_pool=has_pool)
        self.has_kv = has_pool
        self.turns: dict[int, int] = {}
        self.num_turns = 0

    def admit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.take_a_turn(request)
        super().admit(requests)

    def push(self, request: Request) -> None:
        self.take_a_turn(request)
        super().push(request)

    def take_a_turn(self, request: Request) -> None:
        self.num_turns += 1
        self.turns[request.id] = self.num_turns if self.has_kv or not request.num_generated else 0


@settings(max_examples=100)
@given(sizes=SIZES, seed=SEEDS, has_pool=st.booleans())
def test_first_come_first_served_is_a_queue_and_without_a_pool_what_has_run_goes_first(
    sizes: list[int], seed: int, has_pool: bool
) -> None:
    queue = Queue(has_pool=has_pool)
    follow(queue, lambda r: (queue.turns[r.id], r.id), sizes, seed)


@settings(max_examples=100)
@given(sizes=SIZES, ratio=RATIOS, seed=SEEDS)
def test_longest_remaining_first_follows_what_is_known(sizes: list[int], ratio: float, seed: int) -> None:
    def remaining(request: Request) -> float:
        return request.id * 7919 % 500 - request.num_generated

    def rank(request: Request) -> tuple[float, ...]:
        return (-level(remaining(request), ratio), -request.num_generated, request.index, request.id)

    follow(LongestRemainingFirst(remaining, level_ratio=ratio), rank, sizes, seed)


class Judged(Spread):
    """Whether the limit binds is judged anew with each response that ends, as the test says."""

    def __init__(self, binds: Iterable[bool]) -> None:
        super().__init__()
        self.judgements = cycle(binds)
        self.is_bound = next(self.judgements)

    @property
    def limit_binds(self) -> bool:
        return self.is_bound

    def observe(self, request: Request, members: Sequence[Request]) -> None:
        super().observe(request, members)
        self.is_bound = next(self.judgements)


@settings(max_examples=150)
@given(
    sizes=SIZES,
    has_pool=st.booleans(),
    scarce=BY_TURNS,
    binds=BY_TURNS,
    limits=st.sampled_from([(1000,), (1000, 1), (16, 1000, 200)]),
    seed=SEEDS,
)
def test_memory_or_slot_follows_the_limits_and_the_estimates(
    sizes: list[int],
    has_pool: bool,
    scarce: tuple[bool, ...],
    binds: tuple[bool, ...],
    limits: tuple[int, ...],
    seed: int,
) -> None:
    context = Context(spread=Judged(binds))
    turns = cycle(scarce)

    class Turning(MemoryOrSlotOrdering):
        """What is scarce changes between any two decisions."""

        def peek(self) -> Request | None:
            self.memory_is_scarce = next(turns)
            return super().peek()

    ordering = Turning(context, has_pool=has_pool)

    def may_need(request: Request) -> float:
        longest = float(request.max_tokens)
        if context.knows(request.group):
            outgrown = request.num_generated * (1.0 + OVERRUN)
            longest = min(longest, max(context.spread * context.expected_tokens(request.group), outgrown))
        return longest - request.num_generated

    def rank(request: Request) -> tuple[float, ...]:
        if has_pool and not ordering.memory_is_scarce and context.limit_binds:
            left = level(request.max_tokens - request.num_generated, LEVEL_RATIO)
            return (-left, -context.expected_tokens(request.group), request.index, request.id)
        if has_pool and not ordering.memory_is_scarce:
            remaining = expected_remaining_tokens(context, request)
            return (-level(remaining, LEVEL_RATIO), -request.num_generated, request.index, request.id)
        first = may_need(request) if has_pool else request.num_generated
        return (-first, -context.expected_tokens(request.group), request.index, request.id)

    follow(ordering, rank, sizes, seed, context, limits)
