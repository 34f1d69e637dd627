"""The context-aware ordering against its brute-force twin: a list, sorted anew for every question."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_group, requests_of
from seer.buffer import Request
from seer.context import Context
from seer.scheduling.context_aware import ProbesThenLongestGroup
from seer.scheduling.longest_first import LongestRemainingFirst, expected_remaining_tokens


class SortedList:
    """The paper's ordering as its prose has it, with no cleverness."""

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
    for request in requests_of(*(a_group(id, size) for id, size in enumerate(sizes))):
        fast.push(request)
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


@given(remaining=st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_longest_remaining_first_is_a_stable_sort(remaining: list[int]) -> None:
    requests = requests_of(a_group(0, len(remaining)))
    ordering = LongestRemainingFirst(lambda request: remaining[request.id])
    for request in requests:
        ordering.push(request)
    taken = [ordering.pop().id for _ in requests]
    assert taken == sorted(range(len(remaining)), key=lambda id: (-remaining[id], id))


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    ratio=st.sampled_from([1.0, 1.5, 4.0]),
    seed=st.integers(0, 2**32),
)
def test_longest_remaining_first_follows_the_estimates(sizes: list[int], ratio: float, seed: int) -> None:
    context = Context()

    def remaining(request: Request) -> float:
        return max(1.0, expected_remaining_tokens(context, request))

    def rank(request: Request) -> tuple[float, int, int, int]:
        level = math.floor(math.log(remaining(request)) / math.log(ratio)) if ratio > 1 else remaining(request)
        return (-level, -request.num_generated, request.index, request.id)

    ordering = LongestRemainingFirst(remaining, level_ratio=ratio)
    waiting = requests_of(*(a_group(id, size) for id, size in enumerate(sizes)))
    for request in waiting:
        ordering.push(request)
    running: list[Request] = []
    random = Random(seed)
    for _ in range(150):
        operation = random.choice(["take", "take", "stop", "finish"])
        if operation == "take" and waiting:
            best = min(waiting, key=rank)
            assert ordering.pop() is best
            waiting.remove(best)
            running.append(best)
        elif operation != "take" and running:
            request = running.pop(random.randrange(len(running)))
            request.num_generated = min(request.max_tokens, request.num_generated + random.randrange(200))
            if operation == "stop":
                ordering.push(request)
                waiting.append(request)
            else:
                context.observe_finished(request)
                ordering.finished(request)
        assert ordering.peek() is (min(waiting, key=rank) if waiting else None)
