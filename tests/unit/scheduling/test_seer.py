# SPDX-License-Identifier: Apache-2.0
"""Seer's own scheduler: what it runs first, how far, and where."""

from __future__ import annotations

import math
from collections.abc import Callable

from builders import a_group, end
from seer.buffer import Request, RequestBuffer
from seer.context import Context
from seer.fleet import Fleet
from seer.placement import PlacementConfig
from seer.scheduling.leases import CONTEXT_PER_LEASE, LEASE_TOKENS, LEASES_AT_MOST
from seer.scheduling.longest_first import LongestRemainingFirst
from seer.scheduling.memory_or_slot import OVERRUN, MemoryOrSlotOrdering, expected_remaining_tokens
from seer.scheduling.seer import (
    CHUNKS_AT_LEAST,
    CONTEXT_PER_CHUNK,
    MIN_CHUNK_TOKENS,
    TIGHT_CHUNK_TOKENS,
    EarliestFinishPlacement,
    Seer,
)
from seer.transfer import TransferEstimate
from seer.types import Group, InstanceLimits, Sampling


def requests_of(num_groups: int, size: int, *, prompt: int = 64, max_tokens: int = 4096) -> list[Request]:
    groups = [
        Group(id=i, num_requests=size, num_prompt_tokens=prompt, sampling=Sampling(max_tokens=max_tokens))
        for i in range(num_groups)
    ]
    return RequestBuffer().admit(groups, 0.0)


def a_fleet(num: int, *, kv_blocks: int = 1024) -> Fleet:
    limits = InstanceLimits(kv_blocks=kv_blocks, block_size=64, max_num_seqs=1000, max_model_len=1 << 20)
    return Fleet([limits] * num)


def a_scheduler(
    remaining: Callable[[Request], float], *, max_chunk: int = 8192, placement: PlacementConfig | None = None
) -> EarliestFinishPlacement:
    ordering = LongestRemainingFirst(remaining)
    return EarliestFinishPlacement(ordering, remaining, max_chunk_tokens=max_chunk, placement=placement)


def test_of_requests_not_begun_a_group_of_unknown_length_goes_before_one_known_to_be_short() -> None:
    members = requests_of(2, 2)
    context = Context()
    finished = members[0]
    finished.num_generated = 300
    context.observe_finished(finished)
    ordering = MemoryOrSlotOrdering(context)
    ordering.admit(members[1:])
    assert ordering.pop().group.id == 1


def test_in_a_group_of_unknown_length_the_request_that_has_generated_least_goes_first() -> None:
    begun, fresh, other, *_ = requests_of(2, 2)
    begun.num_generated, other.num_generated = 500, 501
    ordering = MemoryOrSlotOrdering(Context())
    for request in (begun, other, fresh):
        ordering.push(request)
    assert [ordering.pop().id for _ in range(3)] == [fresh.id, begun.id, other.id]


def test_a_group_that_looks_short_leaves_memory_to_others_but_for_a_response_that_has_outgrown_it() -> None:
    finished, outgrown, fresh, unknown, *_ = requests_of(2, 3)
    context = Context()
    finished.num_generated = 100
    context.observe_finished(finished)  # its siblings may need 800 tokens, or three times what they have
    outgrown.num_generated, unknown.num_generated = 900, 901
    ordering = MemoryOrSlotOrdering(context)
    for request in (outgrown, unknown, fresh):
        ordering.push(request)
    assert [*ordering.last_first([outgrown, unknown, fresh])] == [fresh, outgrown, unknown]
    assert [ordering.pop().id for _ in range(3)] == [unknown.id, outgrown.id, fresh.id]


def test_the_first_to_finish_may_be_the_shortest_so_its_group_counts_as_several_times_as_long() -> None:
    finished, sibling, unknown, *_ = requests_of(2, 2)
    context = Context()
    finished.num_generated = 1000
    context.observe_finished(finished)
    unknown.num_generated = 1
    ordering = MemoryOrSlotOrdering(context)
    for request in (unknown, sibling):
        ordering.push(request)
    assert ordering.peek() is sibling


def test_waiting_requests_are_ranked_anew_when_groups_have_shown_a_smaller_spread() -> None:
    calm = requests_of(60, 8)
    known, sibling, begun, _ = requests_of(2, 2)
    for new_id, request in enumerate((known, sibling, begun), start=1000):
        request.id = new_id
    known.group = sibling.group = a_group(100, 2, max_tokens=4096)
    begun.group = a_group(101, 2, max_tokens=4096)
    context = Context()
    ordering = MemoryOrSlotOrdering(context)
    known.num_generated, begun.num_generated = 300, 2000  # may need 8 and then 4 times 300; 2,096 tokens
    context.observe_finished(known)
    for request in (sibling, begun):
        ordering.push(request)
    assert ordering.peek() is sibling
    for request in calm:
        end(request, 290 if request.index else 100)
        context.observe_finished(request, [one for one in calm if one.group is request.group])
        ordering.finished(request)
    assert ordering.peek() is begun


def test_limits_and_not_tokens_say_which_may_become_longest() -> None:
    short, long = (requests_of(1, 1, max_tokens=limit)[0] for limit in (1000, 4096))
    long.id, long.num_generated = 1, 600
    ordering = MemoryOrSlotOrdering(Context())
    for request in (short, long):
        ordering.push(request)
    assert ordering.peek() is long


def test_what_an_earlier_weights_version_told_takes_the_limit_s_place() -> None:
    groups = [
        Group(id=i, num_requests=1, num_prompt_tokens=64, sampling=Sampling(max_tokens=4096), key=key)
        for i, key in enumerate(("short", "long", "new"))
    ]
    short, long, new = RequestBuffer().admit(groups, 0.0)
    long.num_generated = 600  # further along than the others, and with more to do than the short one
    ordering = MemoryOrSlotOrdering(Context({"short": 400, "long": 3000}))
    for request in (short, long, new):
        ordering.push(request)
    assert [ordering.pop().id for _ in range(3)] == [new.id, long.id, short.id]


def test_without_a_pool_what_was_begun_goes_on() -> None:
    begun, further, fresh = requests_of(3, 1)
    begun.num_generated, further.num_generated = 500, 700
    ordering = MemoryOrSlotOrdering(Context(), has_pool=False)
    for request in (begun, further, fresh):
        ordering.push(request)
    assert [ordering.pop().id for _ in range(3)] == [further.id, begun.id, fresh.id]


def test_seer_pauses_requests_only_where_there_is_a_pool() -> None:
    begun, fresh = requests_of(2, 1)
    begun.num_generated = 500
    for transfer, first in ((TransferEstimate(), fresh), (None, begun)):
        scheduler = Seer(Context(), max_chunk_tokens=512, placement=PlacementConfig(transfer=transfer))
        fleet = a_fleet(1)
        scheduler.admit([begun, fresh], fleet)
        plan = scheduler.next(fleet)
        assert plan is not None
        assert plan.request is first


def test_where_lanes_and_not_memory_run_out_the_one_expected_to_need_the_most_goes_first() -> None:
    running, unknown, finished, sibling = requests_of(4, 1)
    finished.num_generated, unknown.num_generated = 1000, 700
    sibling.group = finished.group
    for kv_blocks, first in ((10, sibling), (1 << 20, unknown)):
        context = Context()
        context.observe_finished(finished)  # its sibling that has not begun is expected to be as short
        scheduler = Seer(context, max_chunk_tokens=512)
        limits = InstanceLimits(kv_blocks=kv_blocks, block_size=64, max_num_seqs=10, max_model_len=1 << 20)
        fleet = Fleet([limits, limits])
        scheduler.admit([running], fleet)
        plan = scheduler.next(fleet)
        assert plan is not None
        fleet.promise(plan.request, plan.instance, plan.num_blocks)
        scheduler.admit([unknown, sibling], fleet)
        plan = scheduler.next(fleet)
        assert plan is not None
        assert plan.request is first, f"{kv_blocks} blocks"


def test_a_request_that_outran_its_group_is_expected_to_go_on() -> None:
    context = Context()
    short, long = requests_of(1, 2)
    short.num_generated = 100
    context.observe_finished(short)
    long.num_generated = 500
    assert math.isclose(expected_remaining_tokens(context, long), 500 * OVERRUN)
    long.num_generated = 4090
    assert expected_remaining_tokens(context, long) == 6  # never beyond its limit


def test_within_a_level_the_request_that_is_further_along_goes_on() -> None:
    a, b, c = requests_of(3, 1)
    remaining = {a.id: 1100.0, b.id: 1150.0, c.id: 4000.0}
    ordering = LongestRemainingFirst(lambda request: remaining[request.id], level_ratio=1.25)
    a.num_generated = 500
    for request in (a, b, c):
        ordering.push(request)
    assert [ordering.pop().id for _ in range(3)] == [c.id, a.id, b.id]


def test_a_finish_reorders_its_waiting_siblings() -> None:
    first, sibling, _, other = requests_of(2, 2)
    context = Context()
    ordering = MemoryOrSlotOrdering(context)
    for request in (sibling, other):
        ordering.push(request)
    assert ordering.peek() is sibling  # equal bounds: the smaller id
    first.num_generated = 10
    context.observe_finished(first)
    ordering.finished(first)
    assert ordering.peek() is other


def test_every_group_is_probed_before_any_is_probed_twice() -> None:
    members = requests_of(3, 2)
    context = Context()
    ordering = MemoryOrSlotOrdering(context)
    for request in members:
        ordering.push(request)
    assert [ordering.pop().group.id for _ in members] == [0, 1, 2, 0, 1, 2]


def test_leases_are_short_where_memory_is_tight_and_long_where_it_is_not() -> None:
    tight, roomy = a_fleet(2, kv_blocks=64), a_fleet(2, kv_blocks=1 << 20)
    members = requests_of(64, 1, max_tokens=16_384)
    scheduler = a_scheduler(lambda request: 100.0, max_chunk=16_384)
    scheduler.admit(members, tight)
    assert scheduler.chunk_tokens(members[0], tight) == LEASE_TOKENS
    members[0].num_generated = 4000
    assert scheduler.chunk_tokens(members[0], tight) == (64 + 4000) // CONTEXT_PER_LEASE
    assert scheduler.chunk_tokens(members[0], roomy) == 16_384 // CHUNKS_AT_LEAST
    long = requests_of(1, 1, max_tokens=65_536)[0]
    assert scheduler.chunk_tokens(long, tight) == 65_536 // LEASES_AT_MOST
    short = requests_of(1, 1, max_tokens=512)[0]
    assert scheduler.chunk_tokens(short, roomy) == MIN_CHUNK_TOKENS  # no shorter, however short the response may be


def test_without_a_pool_chunks_are_short_where_memory_is_tight() -> None:
    tight, roomy = a_fleet(2, kv_blocks=64), a_fleet(2, kv_blocks=1 << 20)
    members = requests_of(64, 1, max_tokens=65_536)
    scheduler = a_scheduler(lambda request: 100.0, max_chunk=16_384, placement=PlacementConfig(transfer=None))
    scheduler.admit(members, tight)
    assert scheduler.chunk_tokens(members[0], tight) == TIGHT_CHUNK_TOKENS[0]
    members[0].num_generated = 400
    assert (
        scheduler.chunk_tokens(members[0], tight) == (64 + 400) // CONTEXT_PER_CHUNK
    )  # in proportion to short ones too
    assert scheduler.chunk_tokens(members[0], roomy) == 65_536 // CHUNKS_AT_LEAST
    members[0].num_generated = 1300
    assert scheduler.chunk_tokens(members[0], tight) == (64 + 1300) // CONTEXT_PER_CHUNK
    members[0].num_generated = 4000
    assert scheduler.chunk_tokens(members[0], tight) == TIGHT_CHUNK_TOKENS[1]
    short = requests_of(1, 1, max_tokens=512)[0]
    assert scheduler.chunk_tokens(short, roomy) == MIN_CHUNK_TOKENS  # no shorter, however short the response may be


def test_short_requests_pack_together_and_leave_the_long_one_room() -> None:
    members = requests_of(3, 1)
    remaining = {request.id: 100.0 for request in members} | {members[0].id: 50_000.0}
    scheduler = a_scheduler(lambda request: remaining[request.id], max_chunk=512)
    fleet = a_fleet(2)
    scheduler.admit(members, fleet)
    where = {}
    while (plan := scheduler.next(fleet)) is not None:
        fleet.promise(plan.request, plan.instance, plan.num_blocks)
        where[plan.request.id] = plan.instance
    alone = where.pop(members[0].id)
    assert set(where.values()) == {1 - alone}


def test_packing_stops_where_it_would_leave_another_instance_idle() -> None:
    members = requests_of(40, 1)
    remaining = {request.id: 100.0 for request in members} | {members[0].id: 50_000.0}
    scheduler = a_scheduler(lambda request: remaining[request.id], max_chunk=512)
    fleet = a_fleet(2)
    scheduler.admit(members, fleet)
    while (plan := scheduler.next(fleet)) is not None:
        fleet.promise(plan.request, plan.instance, plan.num_blocks)
    assert abs(fleet.in_flight[0] - fleet.in_flight[1]) <= 0.25 * min(fleet.in_flight[0], fleet.in_flight[1]) + 3


def test_nothing_is_promised_that_an_instance_does_not_have() -> None:
    members = requests_of(40, 4)
    scheduler = a_scheduler(lambda request: float(request.id))
    fleet = a_fleet(3, kv_blocks=20)
    scheduler.admit(members, fleet)
    num_started = 0
    while (plan := scheduler.next(fleet)) is not None:
        fleet.promise(plan.request, plan.instance, plan.num_blocks)
        fleet.check()
        num_started += 1
    assert 0 < num_started < len(members)
    assert all(fleet.free_blocks[i] >= 0 for i in range(3))


def test_a_large_fleet_offers_both_its_fullest_and_its_emptiest() -> None:
    fleet = a_fleet(100, kv_blocks=100)
    members = requests_of(100, 1)
    for instance, request in enumerate(members):
        fleet.promise(request, instance, instance)
    offered = fleet.candidates(10, 4)
    assert sorted(offered) == [0, 1, 2, 3, 87, 88, 89, 90]  # those with 90 and more are too full


def test_a_lease_fills_the_blocks_it_reserves_and_a_chunk_that_ends_leaves_whole_blocks() -> None:
    for has_pool in (True, False):
        placement = PlacementConfig(transfer=TransferEstimate() if has_pool else None)
        scheduler = Seer(Context(), max_chunk_tokens=8192, placement=placement, whole_blocks=True)
        fleet = a_fleet(1)
        scheduler.admit(requests_of(8, 16, prompt=77), fleet)
        plan = scheduler.next(fleet)
        assert plan is not None
        assert (77 + plan.max_tokens) % 64 == (0 if has_pool else 1)
