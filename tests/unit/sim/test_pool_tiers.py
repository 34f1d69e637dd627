# SPDX-License-Identifier: Apache-2.0
"""A simulated pool with an SSD tier, and what prefetching is worth there: the same loop and schedulers as live."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from builders import a_workload
from seer.metrics.events import Event, Prefilling
from seer.placement import PlacementConfig
from seer.scheduling.registry import SchedulerSettings
from seer.sim.cluster import SimulationResult, simulate
from seer.sim.pool_tiers import PoolShape, PoolTiers
from seer.transfer import MoveCost, TransferEstimate

LENGTHS = [[600 + 40 * ((3 * g + i) % 7) for i in range(4)] for g in range(8)]
SHAPE = PoolShape(dram_tokens=4000, ssd_tokens=10**6, ssd_tokens_s=4000.0)


def test_what_was_used_longest_ago_goes_to_ssd_and_comes_back() -> None:
    pool = PoolTiers(PoolShape(dram_tokens=100, ssd_tokens=100, ssd_tokens_s=10.0))
    for request in range(3):
        pool.save(request, 40)
    pool.check()
    assert pool.load_s(2, 0.0) == 0.0
    assert pool.load_s(0, 0.0) == pytest.approx(4.0)  # and 1 goes down for it
    assert pool.load_s(0, 3.0) == pytest.approx(1.0)  # it is on its way
    assert pool.load_s(1, 1.0) == pytest.approx(7.0)  # after the first
    assert pool.num_read_late == 2


def test_what_was_prefetched_is_there_when_it_is_needed() -> None:
    pool = PoolTiers(PoolShape(dram_tokens=100, ssd_tokens=100, ssd_tokens_s=10.0))
    for request in range(3):
        pool.save(request, 40)
    pool.prefetch(0, 0.0)
    assert pool.load_s(0, 5.0) == 0.0
    assert (pool.num_read_ahead, pool.num_read_late) == (1, 0)


def test_kv_that_fits_neither_tier_is_dropped() -> None:
    pool = PoolTiers(PoolShape(dram_tokens=50, ssd_tokens=50, ssd_tokens_s=10.0))
    for request in range(3):
        pool.save(request, 40)
    pool.check()
    assert pool.num_dropped == 1
    assert [pool.load_s(request, 0.0) is None for request in (1, 2)].count(True) == 1
    pool.free(2)
    pool.check()


def test_no_sequence_of_calls_breaks_the_tiers() -> None:
    dice = random.Random(0)
    pool = PoolTiers(PoolShape(dram_tokens=300, ssd_tokens=500, ssd_tokens_s=10.0))
    for step in range(3000):
        request = dice.randrange(20)
        action = dice.choice(["save", "free", "prefetch", "load"])
        if action == "save":
            pool.save(request, dice.randrange(1, 90))
        elif action == "free":
            pool.free(request)
        elif action == "prefetch":
            pool.prefetch(request, float(step))
        else:
            pool.load_s(request, float(step))
        pool.check()


def simulated(
    scheduler: str, *, ahead: int, shape: PoolShape = SHAPE
) -> tuple[SimulationResult, PoolTiers, list[Event]]:
    """Memory for four of 32 requests, and DRAM of the pool for five."""
    workload = a_workload(LENGTHS, kv_tokens=2000, chunk_tokens=128, max_num_seqs=16)
    always_move = MoveCost(latency_s=0.0, bandwidth_bytes_s=1e15)  # the small model's KV is as fast to compute
    costs = replace(workload.cost.transfer_costs(), prefetch_tokens=ahead, move=always_move)
    settings = SchedulerSettings(chunk_tokens=128, placement=PlacementConfig(transfer=TransferEstimate(costs)))
    pool = PoolTiers(shape)
    events: list[Event] = []
    found = simulate(workload, scheduler, settings=settings, pool=pool, events=events.append)
    pool.check()
    return found, pool, events


@pytest.mark.parametrize("scheduler", ["seer", "oracle", "seer-oracle"])
def test_prefetching_makes_a_rollout_over_an_ssd_faster(scheduler: str) -> None:
    late, late_pool, late_events = simulated(scheduler, ahead=0)
    early, early_pool, early_events = simulated(scheduler, ahead=1500)
    assert late_pool.num_read_ahead == 0
    assert early_pool.num_read_ahead > early_pool.num_read_late
    assert early.summary.makespan_s < late.summary.makespan_s
    again = [e.num_recomputed for e in (*late_events, *early_events) if isinstance(e, Prefilling)]
    assert max(again) < late.workload.limits().block_size  # the pool holds whole blocks


def test_kv_that_the_pool_dropped_is_computed_again() -> None:
    shape = replace(SHAPE, ssd_tokens=0)
    _, pool, events = simulated("seer", ahead=0, shape=shape)
    assert pool.num_dropped > 0
    assert sum(event.num_recomputed for event in events if isinstance(event, Prefilling)) > 0
    kept, _, _ = simulated("seer", ahead=0)
    assert kept.summary.recomputed_tokens == 0
