# SPDX-License-Identifier: Apache-2.0
"""Instances that join and leave while a rollout runs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seer import HostingConfig, Rollout, Sampling, SyncRollout
from seer.engine.base import OutputSink
from seer.errors import ConfigError, InputError, InstanceError, SeerError
from seer.hosting import ProcessInstance
from seer.hosting.health import Health
from seer.hosting.resizing import start_all
from seer.metrics.events import Event, Extended, Prefilling, Started, Stopped
from seer.rollout import RolloutLoop
from two_machines_driver import MovingIsFree

PROMPTS = [[1, 2, 3 + i] for i in range(8)]
SAMPLING = Sampling(max_tokens=120)
QUICK = HostingConfig(pin_cores=False, heartbeat_s=0.1, silence_deadline_s=5.0, progress_deadline_s=10.0)
Tokens = dict[tuple[int, int], list[int]]


def a_rollout(instances: int, **settings: Any) -> Rollout:
    engine_settings = {"step_s": settings.pop("step_s", 0.001)}
    return Rollout(
        "none", engine="fake", instances=instances, engine_settings=engine_settings, hosting=QUICK, **settings
    )


class AtStart:
    """Does something once, when a number of chunks have started, and notes the instances that got chunks."""

    def __init__(self, number: int, act: Callable[[], Awaitable[object]]) -> None:
        self._left, self._act = number, act
        self.task: asyncio.Task[None] | None = None
        self.used: set[int] = set()
        self.used_after: set[int] = set()

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Started):
            return
        self.used.add(event.instance)
        if self.task is not None and self.task.done():
            self.used_after.add(event.instance)
        self._left -= 1
        if not self._left:
            self.task = asyncio.get_running_loop().create_task(self._acted())

    async def _acted(self) -> None:
        await self._act()


async def tokens_of(rollout: Rollout, prompts: list[Any] = PROMPTS, **settings: Any) -> Tokens:
    groups = [group async for group in rollout.run(prompts, n=4, **{"sampling": SAMPLING} | settings)]
    return {(r.group, r.index): r.token_ids for group in groups for r in group.responses}


@pytest.mark.parametrize("scheduler", ["seer", "divided"])
def test_instances_that_join_take_work_and_change_no_token(scheduler: str) -> None:
    async def scenario() -> None:
        async with a_rollout(1, scheduler=scheduler) as rollout:
            expected = await tokens_of(rollout)
            joined = AtStart(3, lambda: rollout.add_instances(2))
            assert await tokens_of(rollout, events=joined) == expected
            assert joined.task is not None
            await joined.task
            assert joined.used <= {0, 1, 2}
            later = AtStart(0, lambda: asyncio.sleep(0))
            assert await tokens_of(rollout, events=later) == expected  # the next run has all three
            assert later.used == {0, 1, 2}

    asyncio.run(scenario())


@pytest.mark.parametrize("scheduler", ["seer", "verl"])
def test_instances_that_are_removed_hand_their_requests_over_and_get_no_more(scheduler: str) -> None:
    async def scenario() -> None:
        async with a_rollout(4, scheduler=scheduler) as rollout:
            expected = await tokens_of(rollout)
            left = AtStart(12, lambda: rollout.remove_instances([0, 2, 3]))
            assert await tokens_of(rollout, events=left) == expected
            assert left.task is not None
            await left.task
            assert left.used_after <= {1}
            assert [one.is_up for one in rollout.fleet.instances] == [False, True, False, False]
            assert rollout.fleet.num_lost == 0
            retired: set[int] = set()

            def look(event: Event) -> None:
                assert rollout.current is not None
                if rollout.current.loop is not None:
                    retired.update(rollout.current.loop.fleet._retired)

            assert await tokens_of(rollout, events=look) == expected
            assert retired == {0, 2, 3}, "a later run counts on them for long requests"
            await asyncio.wait_for(rollout.fleet.wait_until_up(), 5)

    asyncio.run(scenario())


def test_an_instance_that_joins_after_an_update_has_the_newest_weights(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(1) as rollout:
            await rollout.update_weights(tmp_path)
            assert await rollout.add_instances(1) == [1]
            assert rollout.fleet.instances[1].view().weights_version in (0, 1)  # as it last said
            async with rollout.session() as session:
                handles = [handle for p in PROMPTS for handle in session.submit(p, n=4, sampling=SAMPLING)]
                assert {(await handle).weights_version for handle in handles} == {1}
            await rollout.remove_instances([0])
            assert await rollout.update_weights(tmp_path) == 2
            assert await tokens_of(rollout)

    asyncio.run(scenario())


def test_what_cannot_be_added_or_removed_is_refused_and_the_fleet_goes_on() -> None:
    async def scenario() -> None:
        async with a_rollout(2) as rollout:
            for ids in ([2], [0, 0], [0, 1], [-1]):
                with pytest.raises(ConfigError, match="removed"):
                    await rollout.remove_instances(ids)
            with pytest.raises(ConfigError, match="num_instances"):
                await rollout.add_instances(0)
            object.__setattr__(rollout.engine, "factory", "host_fakes:make_refusing")
            with pytest.raises(SeerError):
                await rollout.add_instances(2)
            assert len(rollout.fleet.instances) == 2
            assert await tokens_of(rollout)

    asyncio.run(scenario())


def test_an_instance_that_dies_while_its_siblings_start_is_not_added_nor_are_they(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pids: list[int] = []

    async def start_and_kill(instances: Sequence[ProcessInstance], sink: OutputSink) -> None:
        await start_all(instances, sink)
        pids.extend(one.pid or 0 for one in instances)
        os.kill(pids[0], signal.SIGKILL)
        await asyncio.wait(instances[0]._tasks[:1])  # its death was noticed

    async def scenario() -> None:
        async with a_rollout(1) as rollout:
            with monkeypatch.context() as patch:
                patch.setattr("seer.hosting.fleet.start_all", start_and_kill)
                with pytest.raises(InstanceError, match=r"of 2 new instances, \[1\] were lost"):
                    await rollout.add_instances(2)
            assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]  # noqa: ASYNC240 - it takes no time
            assert not rollout.fleet._supervisor._restarting
            assert [one.id for one in rollout.fleet.instances] == [0]
            assert await rollout.add_instances(1) == [1]
            await asyncio.wait_for(rollout.fleet.wait_until_up(), 60)
            assert await tokens_of(rollout)

    asyncio.run(scenario())


def test_an_instance_that_comes_back_with_other_blocks_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []
    rejoin = RolloutLoop.rejoin_instance

    def refuse_once(loop: RolloutLoop, instance: int) -> None:
        if not refused:
            refused.append(instance)
            raise ConfigError("instances with blocks of 64 and of 32 tokens cannot share KV")
        rejoin(loop, instance)

    monkeypatch.setattr(RolloutLoop, "rejoin_instance", refuse_once)

    async def scenario() -> None:
        async with a_rollout(2) as rollout:
            expected = await tokens_of(rollout)

            async def kill() -> None:
                os.kill(rollout.fleet.instances[0].pid or 0, signal.SIGKILL)
                while rollout.fleet.num_lost < 2:  # noqa: ASYNC110 - nothing says when it was lost again
                    await asyncio.sleep(0.01)
                await rollout.fleet.wait_until_up()

            async with rollout.session() as session:
                killed = asyncio.create_task(kill())
                handles = [handle for prompt in PROMPTS for handle in session.submit(prompt, n=4, sampling=SAMPLING)]
                assert len([(await handle).token_ids for handle in handles]) == len(expected)
                await killed
            assert (refused, rollout.fleet.num_lost) == ([0], 2)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_an_instance_that_is_not_left_in_time_is_ended_and_its_requests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with a_rollout(2) as rollout:
            expected = await tokens_of(rollout)
            monkeypatch.setattr("seer.hosting.fleet.LEAVE_DEADLINE_S", 0.0)
            left = AtStart(12, lambda: rollout.remove_instances([0]))
            assert await tokens_of(rollout, events=left) == expected
            assert left.task is not None
            await left.task
            assert [one.health for one in rollout.fleet.view()] == [Health.RETIRED, Health.HEALTHY]
            assert rollout.fleet.limits == [rollout.fleet.instances[1].limits]

    asyncio.run(scenario())


def test_a_program_without_an_event_loop_adds_and_removes_instances() -> None:
    settings: dict[str, Any] = {"engine": "fake", "hosting": QUICK, "max_num_seqs": 4}
    with SyncRollout("none", **settings) as rollout:
        assert rollout.add_instances(2, max_num_seqs=7, kv_blocks=99) == [1, 2]
        assert [(one.max_num_seqs, one.kv_blocks) for one in rollout.fleet.limits[1:]] == [(7, 99)] * 2
        rollout.remove_instances([0, 1])
        assert len(rollout.fleet.limits) == 1
        assert len(list(rollout.run(PROMPTS, sampling=SAMPLING))) == len(PROMPTS)


UNLIKE: list[dict[str, Any]] = [{"kv_blocks": 96, "max_num_seqs": 2}, {"kv_memory_bytes": 4 << 20, "max_num_seqs": 5}]


def test_unlike_instances_join_and_change_no_token(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from seer.engine.local.tiny import make_tiny_model

    folder = make_tiny_model(tmp_path / "tiny", seed=3)
    settings: dict[str, Any] = {"pool_bytes": 256 << 20, "kv_blocks": 24, "max_num_seqs": 4, "chunk_tokens": 32}

    async def scenario() -> None:
        async with Rollout(folder, hosting=QUICK, **settings) as rollout:
            fleet = rollout.fleet

            async def join() -> None:
                for own in UNLIKE:
                    await rollout.add_instances(1, **own)

            expected = await tokens_of(rollout)
            joined = AtStart(3, join)
            assert await tokens_of(rollout, events=joined) == expected
            assert joined.task is not None
            await joined.task
            limits = fleet.limits
            assert [(one.kv_blocks, one.max_num_seqs) for one in limits[:2]] == [(24, 4), (96, 2)]
            assert limits[2].max_num_seqs == 5
            assert limits[2].kv_blocks not in (24, 96)
            long = Sampling(max_tokens=450, ignore_eos=True)
            with pytest.raises(InputError, match="384 tokens that fit"):
                Rollout(folder, **settings).encode([[1, 2]], sampling=long)
            assert {len(one) for one in (await tokens_of(rollout, PROMPTS[:1], sampling=long)).values()} == {450}

            os.kill(fleet.instances[1].pid or 0, signal.SIGKILL)
            assert await tokens_of(rollout) == expected
            await asyncio.wait_for(fleet.wait_until_up(), 60)
            assert fleet.num_lost == 1
            assert fleet.limits == limits, "a restarted instance keeps its own settings"

    asyncio.run(scenario())


def test_what_an_instance_without_the_pool_computed_is_computed_again_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where its KV blocks are larger than the pool's, with fewer ranks than the first instances have."""
    pytest.importorskip("torch")
    from seer.engine.local.tiny import make_tiny_model

    folder = make_tiny_model(tmp_path / "tiny", seed=3)
    sampling = Sampling(max_tokens=200, ignore_eos=True)

    async def scenario() -> Leaving:
        async with Rollout(folder, instances=1, pool_bytes=256 << 20, hosting=QUICK, chunk_tokens=64) as rollout:
            assert rollout.fleet.pool is not None
            rollout.fleet.pool.transfer = MovingIsFree()
            engine = rollout.engine
            larger = replace(engine, block_bytes=2 * (engine.block_bytes or 0))
            assert await rollout.fleet.add_instances(1, larger) == [1]
            expected = await tokens_of(rollout, sampling=sampling)
            left = Leaving([1], rollout.remove_instances)
            assert await tokens_of(rollout, sampling=sampling, events=left) == expected
            assert left.task is not None, "nobody left"
            await left.task
            return left

    left = asyncio.run(scenario())
    assert (left.num_recomputed >= 128, left.num_loaded) == (True, 0), "each of its requests had 32 tokens or more"
    assert "are computed again" in caplog.text


class Leaving:
    """Removes instances once requests on each of them have generated tokens, and notes what was computed since."""

    def __init__(self, ids: Sequence[int], remove: Callable[[Sequence[int]], Awaitable[object]]) -> None:
        self._ids, self._remove = ids, remove
        self._waits_for = set(ids)
        self.task: asyncio.Task[None] | None = None
        self.num_parked_tokens = 0
        self.num_recomputed = 0
        self.num_loaded = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Extended | Stopped) and event.num_generated >= 32:
            self._waits_for.discard(event.instance)
            if self.task is None and not self._waits_for:
                self.task = asyncio.get_running_loop().create_task(self._acted())
        if self.task is None:
            return
        if isinstance(event, Stopped) and event.reason == "parked" and event.instance in self._ids:
            self.num_parked_tokens += event.num_generated
        elif isinstance(event, Prefilling):
            self.num_recomputed += event.num_recomputed
            self.num_loaded += event.num_loaded

    async def _acted(self) -> None:
        await self._remove(self._ids)


def test_the_embedded_engine_loads_what_leaving_instances_computed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from seer.engine.local.tiny import make_tiny_model

    folder = make_tiny_model(tmp_path / "tiny", seed=3)
    sampling = Sampling(max_tokens=400, ignore_eos=True)

    async def scenario() -> tuple[Leaving, Tokens, Tokens]:
        async with Rollout(folder, instances=4, pool_bytes=512 << 20, hosting=QUICK) as rollout:
            assert rollout.fleet.pool is not None
            rollout.fleet.pool.transfer = MovingIsFree()
            expected = await tokens_of(rollout, sampling=sampling)
            left = Leaving([0, 1, 2], rollout.remove_instances)
            found = await tokens_of(rollout, sampling=sampling, events=left)
            assert left.task is not None, "nobody left"
            await left.task
            return left, expected, found

    left, expected, found = asyncio.run(scenario())
    assert found == expected
    num_tokens = sum(map(len, found.values()))
    parked, loaded, again = left.num_parked_tokens, left.num_loaded, left.num_recomputed
    print(f"of {num_tokens} tokens {parked} parked, {loaded} loaded, {again} recomputed")
    assert left.num_parked_tokens > 0, "the instances that left had nothing to hand over"
    # Some may find their KV where they go, as they ran there before: the rest is loaded, and nothing computed again.
    assert left.num_loaded > 0
    assert left.num_recomputed <= 0.01 * num_tokens
