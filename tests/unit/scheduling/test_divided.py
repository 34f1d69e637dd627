# SPDX-License-Identifier: Apache-2.0
"""Divided rollout: chunks, memory and orderings."""

import pytest

from builders import DIVIDING, a_context, a_fleet, a_group, a_scheduler, drain, requests_of
from seer.buffer import Request
from seer.context import Context
from seer.scheduling.context_aware import ProbesThenLongestGroup
from seer.scheduling.divided import Divided, end_with_a_block
from seer.scheduling.fixed_rank import FirstComeFirstServed
from seer.scheduling.longest_first import LongestRemainingFirst


@pytest.mark.parametrize(
    ("num_tokens", "wanted", "given"),
    [(64, 128, 113), (65, 128, 128), (65, 16, 16), (64, 1, 1), (64, 5, 5), (70, 16, 11), (70, 100, 91)],
)
def test_a_chunk_can_end_where_a_block_has_just_become_full(num_tokens: int, wanted: int, given: int) -> None:
    request = requests_of(a_group(0, 1, prompt=num_tokens, max_tokens=4000))[0]
    found = end_with_a_block(request, wanted, 16)
    assert found == given
    assert (num_tokens + found) % 16 == 1 or found == wanted  # a chunk too short to reach a block's end stays as it is


@pytest.mark.parametrize("name", DIVIDING)
def test_nothing_is_started_beyond_the_memory_of_its_instances(name: str) -> None:
    scheduler, fleet = a_scheduler(name, chunk_tokens=118), a_fleet(2, blocks=5)  # 10 + 118 tokens: 2 blocks each
    scheduler.admit(requests_of(a_group(0), a_group(1)), fleet)
    plans = drain(scheduler, fleet)

    assert plans
    fleet.check()
    assert all(fleet.free_blocks[instance] >= 0 for instance in range(2))
    assert not any(plan.overcommit for plan in plans)


def test_a_chunk_is_bounded_by_its_length_and_by_what_the_request_may_still_generate() -> None:
    scheduler, fleet = a_scheduler("divided", chunk_tokens=300), a_fleet()
    requests = requests_of(a_group(0, 2, max_tokens=1000))
    requests[1].num_generated = 900
    scheduler.admit(requests, fleet)
    assert {plan.request.id: plan.max_tokens for plan in drain(scheduler, fleet)} == {0: 300, 1: 100}


def test_a_smaller_request_does_not_overtake_the_best_that_fits_nowhere() -> None:
    scheduler, fleet = a_scheduler("divided", chunk_tokens=640), a_fleet(1, blocks=5)
    big, small = requests_of(a_group(0, 1, max_tokens=1000), a_group(1, 1, max_tokens=64))
    scheduler.admit([big, small], fleet)
    assert drain(scheduler, fleet) == []


@pytest.mark.parametrize("has_pool", [True, False])
def test_a_request_that_returns_goes_last_unless_its_kv_would_be_lost(has_pool: bool) -> None:
    ordering = FirstComeFirstServed(has_pool=has_pool)
    first, second, third = requests_of(a_group(0, 3))
    ordering.admit([first, second, third])
    assert ordering.pop() is first
    first.num_generated = 5
    ordering.push(first)
    assert ordering.peek() is (second if has_pool else first)
    expected = [second, third, first] if has_pool else [first, second, third]
    assert [ordering.pop() for _ in expected] == expected
    assert ordering.peek() is None


def test_longest_remaining_first_with_ties_by_id() -> None:
    ordering = LongestRemainingFirst(lambda request: {0: 5, 1: 9, 2: 9}[request.id])
    requests = requests_of(a_group(0, 3))
    for request in requests:
        ordering.push(request)
    assert [ordering.pop().id for _ in requests] == [1, 2, 0]


def order(ordering: ProbesThenLongestGroup, requests: list[Request]) -> list[int]:
    for request in requests:
        ordering.push(request)
    taken = []
    while (first := ordering.peek()) is not None:
        assert ordering.pop() is first
        ordering.granted(first, 10)
        taken.append(first.id)
    return taken


def test_every_probe_goes_before_any_sibling_the_shortest_first() -> None:
    requests = requests_of(a_group(0, 2), a_group(1, 2), a_group(2, 2))
    requests[0].num_generated = 50  # the probe of group 0 has run a chunk
    taken = order(ProbesThenLongestGroup(Context(), starvation_period=0), requests)
    assert taken[:3] == [2, 4, 0]


def test_then_the_longest_group_first_and_unknown_groups_count_as_longest() -> None:
    requests = [r for r in requests_of(a_group(0, 3), a_group(1, 3), a_group(2, 3)) if not r.is_probe]
    taken = order(ProbesThenLongestGroup(a_context({0: 100, 2: 700}), starvation_period=0), requests)
    assert taken == [4, 5, 7, 8, 1, 2]


def test_a_groups_place_moves_when_one_of_its_requests_finishes() -> None:
    context = a_context({0: 100, 1: 200})
    ordering = ProbesThenLongestGroup(context, starvation_period=0)
    requests = requests_of(a_group(0, 2), a_group(1, 2))
    for request in requests:
        if not request.is_probe:
            ordering.push(request)
    assert ordering.peek() is requests[3]
    requests[0].num_generated = 900
    context.observe_finished(requests[0])
    ordering.finished(requests[0])
    assert ordering.peek() is requests[1]


def test_the_least_served_group_is_served_now_and_then() -> None:
    requests = [r for r in requests_of(a_group(0, 5), a_group(1, 5)) if not r.is_probe]
    context = a_context({0: 10, 1: 900})
    taken = order(ProbesThenLongestGroup(context, starvation_period=2), requests)
    assert taken[:4] == [6, 1, 7, 2]  # every second decision goes to the short group, which was served less


def test_an_empty_ordering_cannot_be_popped() -> None:
    with pytest.raises(AssertionError, match="without a waiting request"):
        ProbesThenLongestGroup(Context()).pop()


def test_a_finished_requests_length_reaches_the_ordering() -> None:
    heard: list[str] = []

    class Listening(FirstComeFirstServed):
        def finished(self, request: Request) -> None:
            heard.append("finished")

    scheduler = Divided(Listening(), chunk_tokens=10)
    (request,) = requests_of(a_group(0, 1))
    scheduler.finished(request)
    assert heard == ["finished"]
