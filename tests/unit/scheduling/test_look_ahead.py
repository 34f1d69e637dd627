# SPDX-License-Identifier: Apache-2.0
"""Looking ahead names the requests that the scheduler then starts, within its share of DRAM, and changes nothing."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest

from builders import a_fleet, a_group, requests_of
from seer.buffer import Request
from seer.context import Context
from seer.fleet import Fleet
from seer.placement import PlacementConfig
from seer.scheduling.base import LooksAhead, Scheduler
from seer.scheduling.look_ahead import in_heap_order
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.transfer import TransferCosts, TransferEstimate

DIVIDING = ("divided", "context", "oracle", "seer-paper", "seer", "seer-oracle")


def a_scheduler(name: str, prefetch_tokens: int) -> Scheduler:
    costs = replace(TransferCosts(), prefetch_tokens=prefetch_tokens)
    settings = SchedulerSettings(chunk_tokens=64, placement=PlacementConfig(transfer=TransferEstimate(costs)))
    return make_scheduler(parse_scheduler(name), settings, Context(), lambda request: request.max_tokens)


def paused(scheduler: Scheduler, fleet: Fleet) -> list[Request]:
    """Twelve requests that wait, each with more tokens than the paper's placement would compute again."""
    requests = requests_of(*(a_group(number, 3) for number in range(4)))
    for request in requests:
        request.num_generated, request.last_instance = 700 + 7 * request.id, request.id % 2
    scheduler.admit(requests, fleet)
    return requests


def ahead(scheduler: Scheduler, fleet: Fleet) -> list[int]:
    assert isinstance(scheduler, LooksAhead)
    return [one.request.id for one in scheduler.upcoming(fleet)]


@pytest.mark.parametrize("name", DIVIDING)
def test_the_first_that_are_named_are_the_first_that_start(name: str) -> None:
    scheduler, fleet = a_scheduler(name, 10**6), a_fleet(2, blocks=200)
    paused(scheduler, fleet)
    named = ahead(scheduler, fleet)
    assert named == ahead(scheduler, fleet), "looking changes nothing"
    started = scheduler.next(fleet)
    assert started is not None
    assert started.request.id == named[0]
    assert ahead(scheduler, fleet)[:2] == named[1:3]


@pytest.mark.parametrize("name", DIVIDING)
def test_no_more_is_named_than_dram_is_set_apart_for(name: str) -> None:
    fleet = a_fleet(2, blocks=40)

    fleet = a_fleet(2, blocks=200)
    scheduler = a_scheduler(name, 1500)
    requests = {request.id: request for request in paused(scheduler, fleet)}
    named = ahead(scheduler, fleet)
    assert named
    assert sum(requests[number].num_tokens for number in named) <= 1500
    without = a_scheduler(name, 0)
    paused(without, fleet)
    assert ahead(without, fleet) == []


def test_a_request_is_expected_where_it_was_last_unless_that_is_lost() -> None:
    scheduler, fleet = a_scheduler("divided", 10**6), a_fleet(2, blocks=200)
    paused(scheduler, fleet)
    assert isinstance(scheduler, LooksAhead)
    assert {one.instance for one in scheduler.upcoming(fleet)} == {0, 1}
    fleet.lose(0)
    assert {one.instance for one in scheduler.upcoming(fleet)} == {1}


def test_requests_that_have_generated_nothing_are_not_named() -> None:
    scheduler, fleet = a_scheduler("seer", 10**6), a_fleet(2, blocks=200)
    scheduler.admit(requests_of(a_group(0, 3)), fleet)
    assert ahead(scheduler, fleet) == []


def test_heap_order_is_sorted_order() -> None:
    dice = random.Random(1)
    heap = [(dice.random(), number) for number in range(200)]
    heapq.heapify(heap)
    assert list(in_heap_order(heap)) == sorted(heap)
