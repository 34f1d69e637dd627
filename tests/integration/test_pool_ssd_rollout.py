# SPDX-License-Identifier: Apache-2.0
"""Rollouts whose paused KV does not fit the pool's DRAM: with an SSD tier nothing is computed again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from seer import GroupResult, HostingConfig, Rollout, Sampling
from seer.engine.local.tiny import make_tiny_model
from seer.metrics.events import Event, PoolUsed, Prefilling
from seer.metrics.summary import Summary
from seer.transfer import MoveCost, TransferCosts, TransferEstimate

PROMPTS = [[3 + i, *range(20, 35), 9] for i in range(8)]
SAMPLING = Sampling(max_tokens=96, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class MovingIsFree(TransferEstimate):
    """Always move: computing the tiny model's KV again is in truth as fast as moving it."""

    def __init__(self, given: TransferCosts) -> None:
        move = MoveCost(latency_s=0.0, bandwidth_bytes_s=1e15)
        super().__init__(replace(given, move=move))

    def saw_move(self, num_bytes: int, seconds: float) -> None:
        pass

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        pass


def a_rollout(model: Path, **settings: Any) -> Rollout:
    """KV memory for four requests in all; DRAM of the pool for about an eighth of the 32 requests."""
    defaults: dict[str, Any] = {
        "instances": 2,
        "kv_blocks": 16,
        "max_num_seqs": 2,
        "chunk_tokens": 16,
        "speculation": "off",
        "hosting": HostingConfig(pin_cores=False),
    }
    rollout = Rollout(model, **defaults | settings)
    assert rollout.fleet.pool is not None
    rollout.fleet.pool.transfer = MovingIsFree(rollout.fleet.pool.transfer.costs)
    return rollout


def dram_for(model: Path, num_blocks: int) -> int:
    block_bytes = Rollout(model, instances=2).engine.block_bytes
    assert block_bytes is not None
    return num_blocks * -(-block_bytes // 4096) * 4096  # slots are whole pages


async def rolled_out(rollout: Rollout, events: list[Event]) -> list[GroupResult]:
    return [g async for g in rollout.run(PROMPTS, n=4, sampling=SAMPLING, scheduler="seer", events=events.append)]


def roll_out(rollout: Rollout) -> tuple[list[GroupResult], list[Event], Summary]:
    events: list[Event] = []

    async def scenario() -> list[GroupResult]:
        async with rollout:
            return await rolled_out(rollout, events)

    groups = asyncio.run(scenario())
    assert rollout.summary is not None
    return groups, events, rollout.summary


def tokens_of(groups: list[GroupResult]) -> dict[tuple[int, int], list[int]]:
    return {(r.group, r.index): list(r.token_ids) for group in groups for r in group.responses}


def test_kv_that_finds_no_room_in_dram_comes_back_from_ssd(model: Path, tmp_path: Path) -> None:
    dram = dram_for(model, 28)  # a response ends with 7 full blocks, and there are 32 of them
    groups, events, summary = roll_out(
        a_rollout(model, pool_bytes=dram, pool_ssd_dir=tmp_path, pool_ssd_bytes=8 * dram)
    )
    without, _, summary_without = roll_out(a_rollout(model, pool_bytes=dram))
    assert tokens_of(groups) == tokens_of(without)
    assert (summary.recomputed_tokens, summary.pool_refused_blocks) == (0, 0)
    assert summary_without.recomputed_tokens > 0.1 * summary_without.num_tokens
    assert summary_without.pool_refused_blocks > 0
    (used,) = [event for event in events if isinstance(event, PoolUsed)]
    assert min(used.num_spilled, used.num_hit_ssd + used.num_prefetched) > 0
    assert min(used.num_prefetched, used.num_hit_dram) > 0, "without hints every block here is read from SSD in a step"
    assert summary.pool_ssd_written_bytes == used.num_spilled * used.block_bytes
    assert summary.pool_ssd_read_bytes == (used.num_hit_ssd + used.num_prefetched) * used.block_bytes
    assert list(tmp_path.rglob("*.slab")) == []


def test_the_ssd_is_not_written_while_dram_holds_everything(model: Path, tmp_path: Path) -> None:
    dram = dram_for(model, 32 * 8)
    _, _, summary = roll_out(a_rollout(model, pool_bytes=dram, pool_ssd_dir=tmp_path, pool_ssd_bytes=dram))
    assert (summary.recomputed_tokens, summary.pool_ssd_written_bytes) == (0, 0)


def test_one_instance_keeps_the_kv_of_paused_requests_on_ssd_too(model: Path, tmp_path: Path) -> None:
    dram = dram_for(model, 28)
    rollout = a_rollout(model, instances=1, pool_bytes=dram, pool_ssd_dir=tmp_path, pool_ssd_bytes=8 * dram)
    _, events, summary = roll_out(rollout)
    assert summary.recomputed_tokens == 0
    assert sum(event.num_loaded for event in events if isinstance(event, Prefilling)) > 0


def test_new_weights_drop_what_is_on_ssd(model: Path, tmp_path: Path) -> None:
    dram = dram_for(model, 28)

    async def scenario() -> tuple[int, int]:
        async with a_rollout(model, pool_bytes=dram, pool_ssd_dir=tmp_path, pool_ssd_bytes=8 * dram) as rollout:
            pool = rollout.fleet.pool
            assert pool is not None
            most_on_ssd = 0

            def watch(event: Event) -> None:
                nonlocal most_on_ssd
                stats = pool.stats()
                most_on_ssd = max(most_on_ssd, stats.ssd_bytes if stats is not None else 0)
                if most_on_ssd:
                    rollout.cancel()

            async for _ in rollout.run(PROMPTS, n=4, sampling=SAMPLING, scheduler="seer", events=watch):
                pass
            await rollout.update_weights(model)
            stats = pool.stats()
            assert stats is not None
            return most_on_ssd, stats.ssd_bytes

    most_on_ssd, left = asyncio.run(scenario())
    assert most_on_ssd > 0
    assert left == 0
