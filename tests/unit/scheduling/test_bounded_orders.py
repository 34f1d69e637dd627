# SPDX-License-Identifier: Apache-2.0
"""Schedulers of a program that never ends, as `seer serve` is, keep nothing of requests that have left."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from seer.buffer import Request, RequestBuffer
from seer.context import Context
from seer.fleet import Fleet
from seer.scheduling.context_aware import ProbesThenLongestGroup
from seer.scheduling.longest_first import LongestRemainingFirst
from seer.scheduling.memory_or_slot import MemoryOrSlotOrdering
from seer.scheduling.seer import STALE_AT_MOST, EarliestFinishPlacement
from seer.types import Group, InstanceLimits, Sampling

NUM_REQUESTS = 1000
LIMITS = InstanceLimits(kv_blocks=1024, block_size=64, max_num_seqs=1000, max_model_len=1 << 20)


def new_requests(number: int) -> list[Request]:
    """Two of a group: a probe, and another."""
    group = Group(id=number, num_requests=2, num_prompt_tokens=8, sampling=Sampling(max_tokens=4096))
    return RequestBuffer().admit([group], 0.0)


def num_requests() -> int:
    """That exist."""
    gc.collect()
    return sum(type(one) is Request for one in gc.get_objects())


def by_memory(context: Context) -> MemoryOrSlotOrdering:
    return MemoryOrSlotOrdering(context)


def by_slots(context: Context) -> MemoryOrSlotOrdering:
    ordering = MemoryOrSlotOrdering(context)
    ordering.memory_is_scarce = False
    ordering.peek()  # the order by slots is made
    return ordering


def by_context(context: Context) -> ProbesThenLongestGroup:
    return ProbesThenLongestGroup(context, starvation_period=0)


@pytest.mark.parametrize("make", [by_memory, by_slots, by_context])
def test_no_order_keeps_requests_that_were_started(make: Callable[[Context], Any]) -> None:
    ordering, before = make(Context()), num_requests()
    for number in range(NUM_REQUESTS):
        ordering.admit(new_requests(number))
        ordering.pop()
        ordering.pop()
        ordering.forget(number)
    assert ordering.peek() is None
    assert num_requests() - before < 20


def test_groups_that_never_come_first_are_dropped_when_they_leave() -> None:
    ordering = by_context(Context())
    for number in range(NUM_REQUESTS):
        ordering.admit(new_requests(number))
        ordering.pop()
        ordering.pop()
        ordering.forget(number)
    assert len(ordering._by_service._heap) + len(ordering._by_service._entered) < 20


def test_short_requests_that_have_left_do_not_pile_up_under_a_long_one() -> None:
    remaining: dict[int, float] = {}
    ordering = LongestRemainingFirst(lambda request: remaining[request.id])
    scheduler = EarliestFinishPlacement(ordering, lambda request: remaining[request.id], max_chunk_tokens=64)
    fleet, buffer = Fleet([LIMITS]), RequestBuffer()
    for number in range(NUM_REQUESTS):
        group = Group(id=number, num_requests=1, num_prompt_tokens=8, sampling=Sampling(max_tokens=64))
        (request,) = buffer.admit([group], 0.0)
        remaining[request.id] = 9.0 if number else 1e6
        scheduler.admit([request], fleet)
        plan = scheduler.next(fleet)
        assert plan is not None
        if number:
            scheduler.finished(request)
    assert len(scheduler._longest[0]) <= STALE_AT_MOST + 2
    assert scheduler._longest_remaining(0) == 1e6, "the one that runs"
