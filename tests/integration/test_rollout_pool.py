# SPDX-License-Identifier: Apache-2.0
"""The KV pool of a rollout: emptied as requests end, whichever way they do, and survived when it fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from faults import damage
from pools import a_mooncake_store

pytest.importorskip("torch")

from seer import GroupResult, HostingConfig, Rollout, Sampling
from seer.engine.local.tiny import make_tiny_model
from seer.errors import ConfigError
from seer.hosting.fleet_pool import FleetPool
from seer.kvpool.base import PoolStats
from seer.kvpool.local_files import PoolFiles
from seer.kvpool.serve import ServeState
from seer.metrics.events import Event, Prefilling, Started, Stepped, Stopped
from seer.transfer import MoveCost, TransferCosts, TransferEstimate

PROMPTS = [[3 + i, 7, 11, 5 + i, 9] for i in range(6)]
SAMPLING = Sampling(max_tokens=80)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def a_rollout(model: Path, **settings: Any) -> Rollout:
    defaults: dict[str, Any] = {
        "instances": 2,
        "kv_blocks": 512,
        "max_num_seqs": 8,
        "chunk_tokens": 16,
        "pool_bytes": 16 << 20,
        "hosting": HostingConfig(pin_cores=False),
    }
    return Rollout(model, **defaults | settings)


def tokens_of(groups: list[GroupResult]) -> dict[tuple[int, int], list[int]]:
    return {(r.group, r.index): r.token_ids for group in groups for r in group.responses}


class MovingIsFree(TransferEstimate):
    """Always move: computing the tiny model's KV again is in truth as fast as moving it."""

    def __init__(self) -> None:
        super().__init__(TransferCosts(move=MoveCost(latency_s=0.0, bandwidth_bytes_s=1e15)))

    def saw_move(self, num_bytes: int, seconds: float) -> None:
        pass

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        pass


async def rolled_out(rollout: Rollout, **settings: Any) -> list[GroupResult]:
    return [group async for group in rollout.run(PROMPTS, n=4, sampling=SAMPLING, **settings)]


def pool_of(rollout: Rollout) -> FleetPool:
    assert rollout.fleet.pool is not None
    return rollout.fleet.pool


def stats_of(rollout: Rollout) -> PoolStats:
    stats = pool_of(rollout).stats()
    assert stats is not None
    return stats


class Once:
    """An event sink that does something the first time an event of some kind comes."""

    def __init__(self, kind: type[Event], action: Any, when: Callable[[Any], bool] = lambda event: True) -> None:
        self._kind, self._action, self._when = kind, action, when

    def __call__(self, event: Event) -> None:
        if self._action is not None and isinstance(event, self._kind) and self._when(event):
            action, self._action = self._action, None
            action()


def test_a_request_that_ends_in_any_way_leaves_nothing_pinned(model: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(model) as rollout:
            await rolled_out(rollout)  # stopped, or at its limit
            assert (stats_of(rollout).num_put > 0, stats_of(rollout).num_pinned_blocks) == (True, 0)
            await rolled_out(rollout, lengths=[[40] * 4] * len(PROMPTS))  # cut from outside: the engine does not know
            assert stats_of(rollout).num_pinned_blocks == 0
            cancelled = await rolled_out(rollout, events=Once(Stopped, rollout.cancel))
            assert any(not r.is_complete for group in cancelled for r in group.responses)
            assert stats_of(rollout).num_pinned_blocks == 0

    asyncio.run(scenario())


def test_a_request_that_fails_leaves_nothing_pinned(model: Path) -> None:
    async def scenario() -> list[GroupResult]:
        async with a_rollout(model) as rollout:

            def refuse() -> None:
                for instance in rollout.fleet.instances:  # every later chunk of request 0 fails at once
                    submit = instance.submit

                    def failing(chunk: Any, submit: Any = submit) -> None:
                        submit(chunk if chunk.request else _too_long(chunk))

                    instance.submit = failing  # type: ignore[method-assign]

            groups = await rolled_out(rollout, events=Once(Stopped, refuse))
            assert stats_of(rollout).num_pinned_blocks == 0
            return groups

    failed = [r for group in asyncio.run(scenario()) for r in group.responses if r.finish_reason.value == "failed"]
    assert [(r.group, r.index) for r in failed] == [(0, 0)]
    assert failed[0].num_tokens, "it had begun, so there was KV to free"


def _too_long(chunk: Any) -> Any:
    return replace(chunk, max_tokens=10**6)


def test_new_weights_empty_the_pool(model: Path) -> None:
    async def scenario() -> tuple[int, int]:
        async with a_rollout(model) as rollout:
            # A request at its second chunk has left the blocks of its first in the pool.
            again = Once(Started, rollout.cancel, when=lambda started: started.moved_from is not None)
            await rolled_out(rollout, events=again)
            await rollout.update_weights(model)
            return stats_of(rollout).num_put, stats_of(rollout).num_blocks

    num_put, num_blocks = asyncio.run(scenario())
    assert num_put > 0
    assert num_blocks == 0


def test_damage_is_noticed_computed_again_and_reported(model: Path) -> None:
    async def scenario() -> tuple[list[GroupResult], list[GroupResult], Any]:
        async with a_rollout(model) as rollout:
            expected = await rolled_out(rollout)
            assert rollout.summary is not None
            assert (rollout.summary.pool_failures, rollout.summary.pool_corrupt) == (0, 0)
            await rollout.update_weights(model)
            pool_of(rollout).transfer = MovingIsFree()
            victim = rollout.fleet.instances[1]

            def kill_and_damage() -> None:
                assert victim.pid is not None
                os.kill(victim.pid, signal.SIGKILL)
                damage(pool_of(rollout))

            # A second chunk in a row that is about to start there: it goes on elsewhere, where nobody has the KV of the
            # first. The pool does.
            twice_there = Once(
                Started, kill_and_damage, when=lambda one: one.moved_from == one.instance == victim.id and one.load_kv
            )
            return expected, await rolled_out(rollout, events=twice_there), rollout.summary

    expected, groups, summary = asyncio.run(scenario())
    assert tokens_of(groups) == tokens_of(expected)
    assert summary.pool_corrupt > 0
    assert summary.pool_recomputed_tokens > 0


def test_instances_come_back_though_the_pools_note_was_destroyed(model: Path, tmp_path: Path) -> None:
    async def scenario() -> tuple[list[GroupResult], list[GroupResult]]:
        hosting = HostingConfig(pin_cores=False, restart_pause_s=0.0, max_restarts=2)
        async with a_rollout(model, hosting=hosting, pool_ssd_dir=tmp_path, pool_ssd_bytes=16 << 20) as rollout:
            expected = await rolled_out(rollout)

            def strike() -> None:
                files = PoolFiles.find(pool_of(rollout).settings["name"], "/dev/shm")
                assert files is not None
                files.note.write_bytes(b"no note")
                for instance in rollout.fleet.instances:
                    os.kill(instance.pid or 0, signal.SIGKILL)

            groups = await rolled_out(rollout, events=Once(Stopped, strike))
            await rollout.fleet.wait_until_up()
            return expected, groups

    expected, groups = asyncio.run(scenario())
    assert tokens_of(groups) == tokens_of(expected)


@pytest.fixture
def mooncake() -> Iterator[ServeState]:
    with a_mooncake_store() as state:
        yield state


def test_a_killed_mooncake_master_costs_time_and_no_token(model: Path, mooncake: ServeState) -> None:
    async def scenario() -> tuple[list[GroupResult], list[GroupResult], Any]:
        async with a_rollout(model, pool="mooncake", pool_name=mooncake.name) as rollout:
            expected = await rolled_out(rollout)
            assert rollout.summary is not None
            assert rollout.summary.pool_failures == 0

            def kill_for_good() -> None:
                os.kill(mooncake.pid, signal.SIGSTOP)  # or it would start the master again within a second
                os.kill(mooncake.pids["master"], signal.SIGKILL)

            kill = Once(Stopped, kill_for_good)
            return expected, await rolled_out(rollout, events=kill, scheduler="context"), rollout.summary

    expected, groups, summary = asyncio.run(scenario())
    assert {(r.group, r.index): r.token_ids for g in groups for r in g.responses} == {
        (r.group, r.index): r.token_ids for g in expected for r in g.responses
    }
    assert summary.pool_failures > 0


def test_a_mooncake_pool_that_is_not_up_is_refused_before_anything_starts(model: Path) -> None:
    with pytest.raises(ConfigError, match="no Mooncake pool named 'nowhere'"):
        a_rollout(model, pool="mooncake", pool_name="nowhere")


def test_kv_that_was_dropped_at_home_comes_back_from_the_pool(model: Path) -> None:
    """Memory for few requests at a time, many resting: what was dropped for others is loaded, not computed again."""
    events: list[Event] = []

    async def scenario() -> None:
        async with a_rollout(model, kv_blocks=12, max_num_seqs=4) as rollout:
            pool_of(rollout).transfer = MovingIsFree()
            await rolled_out(rollout, events=events.append, scheduler="divided")

    asyncio.run(scenario())
    loaded = sum(event.num_loaded for event in events if isinstance(event, Prefilling))
    steps = [event for event in events if isinstance(event, Stepped)]
    assert any(event.load_kv and event.moved_from == event.instance for event in events if isinstance(event, Started))
    assert loaded > 0
    assert sum(step.loaded_bytes for step in steps) > 0
    assert sum(step.load_s for step in steps) > 0


def test_a_chunk_that_goes_on_at_home_computes_nothing_again(model: Path) -> None:
    events: list[Event] = []

    async def scenario() -> None:
        async with a_rollout(model, instances=1) as rollout:  # nowhere else to go, and memory for all
            await rolled_out(rollout, events=events.append, scheduler="divided")

    asyncio.run(scenario())
    again = [e for e in events if isinstance(e, Prefilling) and e.num_tokens and e.num_recomputed]
    num_chunks = sum(isinstance(event, Started) for event in events)
    assert num_chunks > 2 * len(PROMPTS) * 4
    assert again == []
