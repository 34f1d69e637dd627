# SPDX-License-Identifier: Apache-2.0
"""Schedulers that place a request once."""

import pytest

from builders import a_fleet, a_group, a_scheduler, drain, limits, requests_of
from seer.buffer import Request
from seer.fleet import Fleet
from seer.scheduling.streamrl import StreamRLOracle, TokenSeconds


def groups(count: int, size: int = 4) -> list[Request]:
    return requests_of(*(a_group(id, size) for id in range(count)))


def places(name: str, requests: list[Request], instances: int) -> list[int]:
    scheduler, fleet = a_scheduler(name), a_fleet(instances)
    scheduler.admit(requests, fleet)
    return [plan.instance for plan in drain(scheduler, fleet)]


def test_verl_sync_gives_each_instance_a_contiguous_block_of_groups() -> None:
    assert places("verl-sync", groups(4, 2), 2) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert places("verl-sync", groups(5, 1), 2) == [0, 0, 0, 1, 1]


def test_verl_spreads_requests_evenly() -> None:
    assert places("verl", groups(2, 3), 3) == [0, 1, 2, 0, 1, 2]


def test_group_keeps_groups_together_on_the_least_pending_instance() -> None:
    assert places("group", requests_of(a_group(0, 3), a_group(1, 1), a_group(2, 1), a_group(3, 2)), 2) == [
        *(0, 0, 0),
        *(1, 1),
        *(1, 1),
    ]


@pytest.mark.parametrize("name", ["verl-sync", "verl", "group", "streamrl-oracle"])
def test_whole_requests_are_submitted_at_once_whatever_the_memory(name: str) -> None:
    scheduler, fleet = a_scheduler(name), a_fleet(2, blocks=1)
    requests = groups(6)
    scheduler.admit(requests, fleet)
    plans = drain(scheduler, fleet)

    assert sorted(plan.request.id for plan in plans) == [request.id for request in requests]
    assert all(plan.max_tokens == 1000 and plan.overcommit for plan in plans)


def test_a_lost_instances_requests_go_to_the_least_loaded() -> None:
    scheduler, fleet = a_scheduler("verl-sync"), a_fleet(3)
    requests = groups(3, 2)
    scheduler.admit(requests, fleet)
    drain(scheduler, fleet)
    lost = fleet.lose(0)
    for id in lost:
        scheduler.requeue(requests[id])
    assert [plan.instance for plan in drain(scheduler, fleet)] == [1, 2]


def test_nothing_is_sent_while_no_instance_lives() -> None:
    scheduler, fleet = a_scheduler("verl"), a_fleet(1)
    scheduler.admit(groups(1), fleet)
    fleet.lose(0)
    assert scheduler.next(fleet) is None


def streamrl_places(
    lengths: list[list[int]], instances: int, token_s: TokenSeconds | None = None, fleet: Fleet | None = None
) -> dict[int, list[int]]:
    """By instance, the groups of the requests that it gets, in order."""
    flat = [length for row in lengths for length in row]
    requests = requests_of(*(a_group(id, len(row)) for id, row in enumerate(lengths)))
    scheduler = StreamRLOracle(lambda request: flat[request.id], token_s)
    fleet = fleet or a_fleet(instances, blocks=1000)
    scheduler.admit(requests, fleet)
    found: dict[int, list[int]] = {}
    for plan in drain(scheduler, fleet):
        found.setdefault(plan.instance, []).append(plan.request.group.id)
    return found


def test_streamrl_sends_the_long_tail_to_instances_of_its_own_longest_first() -> None:
    places = streamrl_places([[10, 10]] * 8 + [[40, 40], [50, 50]], 2)
    assert places[0] == [9, 9, 8, 8]
    assert set(places[1]) == set(range(8))


def test_streamrl_keeps_groups_whole() -> None:
    places = streamrl_places([[10, 90], [20, 80], [30, 60], [5, 5], [7, 6]], 3)
    assert sorted(group for groups in places.values() for group in set(groups)) == [0, 1, 2, 3, 4]


def test_streamrl_gives_the_long_tail_smaller_batches_only_where_these_are_faster() -> None:
    lengths = [[100, 100]] * 16 + [[400, 400]] * 4
    alike = streamrl_places(lengths, 6, lambda num_requests, context_tokens: 1.0)
    faster = streamrl_places(lengths, 6, lambda num_requests, context_tokens: 1.0 + num_requests)
    assert [sum(groups[0] >= 16 for groups in places.values()) for places in (alike, faster)] == [1, 3]


def test_streamrl_divides_unlike_instances_alike_wherever_the_odd_one_stands() -> None:
    lengths = [[100, 100]] * 16 + [[400, 400]] * 4
    num_dedicated = []
    for odd in (0, 5):
        unlike = [limits(1000, max_num_seqs=10)] * 6
        unlike[odd] = limits(1000, max_num_seqs=1)
        places = streamrl_places(lengths, 6, lambda num_requests, context_tokens: 1.0 + num_requests, Fleet(unlike))
        num_dedicated.append(sum(groups[0] >= 16 for groups in places.values()))
    assert num_dedicated[0] == num_dedicated[1]


def test_streamrl_shares_one_instance_among_all_groups() -> None:
    assert streamrl_places([[10], [30], [20]], 1) == {0: [1, 2, 0]}


def test_streamrl_takes_an_empty_batch() -> None:
    scheduler, fleet = a_scheduler("streamrl-oracle"), a_fleet(2)
    scheduler.admit([], fleet)
    assert scheduler.next(fleet) is None
