# SPDX-License-Identifier: Apache-2.0
"""Instances that join and leave while the fleet does something else: restarts, new weights, its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seer import HostingConfig, Rollout, Sampling
from seer.errors import ConfigError, DeadlineExceeded, InstanceError, SeerError
from seer.hosting.health import Health
from seer.hosting.process import ProcessInstance

DEADLINE_S = 120.0
PATIENT = HostingConfig(pin_cores=False, heartbeat_s=0.1, silence_deadline_s=600.0, restart_pause_s=0.0)
SAMPLING = Sampling(max_tokens=40)
PROMPTS = [[1, 2, 3 + i] for i in range(4)]


def a_rollout(instances: int, factory: str | None = None, **settings: Any) -> Rollout:
    hosting = replace(PATIENT, **settings.pop("hosting", {}))
    rollout = Rollout("none", engine="fake", instances=instances, hosting=hosting, **settings)
    if factory is not None:
        object.__setattr__(rollout.engine, "factory", f"host_fakes:{factory}")
    return rollout


def play(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, DEADLINE_S))


class Pids:
    """Process ids of all instances that were ever launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[int] = []
        self.news = asyncio.Event()
        setup = ProcessInstance._setup

        def note(instance: ProcessInstance, child: Any, *rank: Any) -> Any:
            self.found.append(child.pid)
            self.news.set()
            return setup(instance, child, *rank)

        monkeypatch.setattr(ProcessInstance, "_setup", note)

    async def reach(self, num: int) -> None:
        while len(self.found) < num:
            self.news.clear()
            await self.news.wait()

    @property
    def alive(self) -> list[int]:
        return [pid for pid in self.found if os.path.exists(f"/proc/{pid}")]


async def versions_of(rollout: Rollout) -> set[int]:
    """Weights versions of the responses of a run, all of which ended by themselves."""
    responses = [r async for group in rollout.run(PROMPTS, n=4, sampling=SAMPLING) for r in group.responses]
    assert len(responses) == 16
    assert all(response.is_complete for response in responses), [response.error for response in responses]
    return {response.weights_version for response in responses}


def test_a_rollout_that_ends_while_instances_join_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = Pids(monkeypatch)

    async def scenario() -> None:
        async with a_rollout(1) as rollout:
            adding = asyncio.create_task(rollout.add_instances(2))
            await pids.reach(3)
        with pytest.raises(InstanceError, match="closed while 2 more instances started"):
            await adding

    play(scenario())
    assert not pids.alive


@pytest.mark.parametrize("num_launched", [0, 1])
def test_an_instance_that_is_removed_while_it_restarts_leaves_no_process(
    num_launched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = Pids(monkeypatch)

    async def scenario() -> None:
        async with a_rollout(2) as rollout:
            os.kill(rollout.fleet.instances[1].pid or 0, signal.SIGKILL)
            while not rollout.fleet.num_lost:  # noqa: ASYNC110 - nothing says when it is noticed
                await asyncio.sleep(0)
            await pids.reach(2 + num_launched)
            waiting = asyncio.create_task(rollout.fleet.wait_until_up())
            await asyncio.sleep(0)
            await rollout.remove_instances([1])
            await waiting  # not for one that never comes
            assert pids.alive == [rollout.fleet.instances[0].pid]
            assert rollout.fleet.view()[1].health is Health.RETIRED
            assert await versions_of(rollout) == {0}

    play(scenario())
    assert not pids.alive


def test_an_instance_that_leaves_while_weights_change_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(1) as rollout:
            engine = replace(rollout.engine, factory="host_fakes:make_never_updating")
            await rollout.fleet.add_instances(1, engine)
            updating = asyncio.create_task(rollout.update_weights(tmp_path))
            while not rollout.fleet.instances[1]._calls._answers:  # noqa: ASYNC110 - a few turns of the event loop
                await asyncio.sleep(0)
            await rollout.remove_instances([1])
            assert await updating == 1
            assert await versions_of(rollout) == {1}

    play(scenario())


def test_instances_with_other_blocks_are_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = Pids(monkeypatch)

    async def scenario() -> None:
        async with a_rollout(1) as rollout:
            engine = rollout.engine
            config = replace(engine.config, kv=replace(engine.config.kv, block_size=64))
            with pytest.raises(ConfigError, match="a new instance has blocks of 64 tokens, the others of 16"):
                await rollout.fleet.add_instances(1, replace(engine, config=config))
            assert len(pids.alive) == len(rollout.fleet.instances) == 1
            assert await versions_of(rollout) == {0}

    play(scenario())


async def lose(rollout: Rollout, instance: int) -> None:
    """Kill it when it has no restart left."""
    before = rollout.fleet.num_lost
    os.kill(rollout.fleet.instances[instance].pid or 0, signal.SIGKILL)
    while rollout.fleet.num_lost == before:  # noqa: ASYNC110 - nothing says when it is noticed
        await asyncio.sleep(0)
    for _ in range(5):  # the supervisor's task
        await asyncio.sleep(0)


def test_instances_that_join_when_none_is_left_take_the_next_run() -> None:
    async def scenario() -> None:
        async with a_rollout(1, hosting={"max_restarts": 0}) as rollout:
            for newest in (0, 1):
                await lose(rollout, newest)
                with pytest.raises(
                    InstanceError, match=f"no instance is left; the last one lost was instance {newest}"
                ):
                    await versions_of(rollout)
                await rollout.add_instances(1)
                assert await versions_of(rollout) == {0}

    play(scenario())


def test_a_session_whose_last_instance_is_removed_ends_at_once() -> None:
    async def scenario() -> None:
        async with a_rollout(2, hosting={"max_restarts": 0}) as rollout, rollout.session() as session:
            await lose(rollout, 0)  # it stays in the fleet: its restarts are renewed after an hour
            (handle,) = session.submit([1, 2, 3], sampling=Sampling(max_tokens=2000))
            await rollout.remove_instances([1])
            with pytest.raises(InstanceError, match="no instance is left"):
                await handle

    play(scenario())


def test_weights_that_one_instance_refuses_are_on_none(tmp_path: Path) -> None:
    """As where one node does not see the storage that they are on."""

    async def scenario() -> None:
        async with a_rollout(2, "make_choosy") as rollout:
            with pytest.raises(ConfigError, match="there are no weights at"):
                await rollout.update_weights(tmp_path)
            assert rollout.weights_version == 0
            assert await versions_of(rollout) == {0}
            await rollout.fleet.wait_until_up()
            assert [status.weights_version for status in rollout.fleet.view()] == [0, 0]
            (tmp_path / "seen-by-1").touch()
            assert await rollout.update_weights(tmp_path) == 1
            assert await versions_of(rollout) == {1}
            assert await rollout.add_instances(1) == [2]
            assert rollout.fleet.view()[2].weights_version == 1

    play(scenario())


def test_weights_do_not_change_under_a_session(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(1) as rollout, rollout.session() as session:
            with pytest.raises(SeerError, match="a run or a session is going on"):
                await rollout.update_weights(tmp_path)
            (first,) = session.submit([1, 2, 3], sampling=SAMPLING)
            assert (await first).weights_version == 0
            await session.update_weights(tmp_path)
            (second,) = session.submit([1, 2, 3], sampling=SAMPLING)
            assert (await second).weights_version == 1

    play(scenario())


def test_weights_that_do_not_come_in_time_are_on_none_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(1, "make_never_updating", hosting={"call_deadline_s": 0.2}) as rollout:
            with pytest.raises(DeadlineExceeded):
                await rollout.update_weights(tmp_path)
            await rollout.fleet.wait_until_up()
            assert rollout.fleet.num_lost == 1, "what it has of the new weights is not known"

    play(scenario())


def test_a_prompt_that_was_held_and_fits_no_longer_fails_and_others_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(1, kv_blocks=16) as rollout:
            await rollout.add_instances(1, kv_blocks=512)
            async with rollout.session() as session:
                held = asyncio.Event()

                async def change() -> None:
                    await held.wait()
                    await rollout.remove_instances([1])
                    await rollout.fleet.update_weights(tmp_path)

                changing = asyncio.create_task(session.change_weights(change))
                await asyncio.sleep(0)
                (long,) = session.submit([1, 2, 3], sampling=Sampling(max_tokens=1000))
                (short,) = session.submit([1, 2, 3], sampling=SAMPLING)
                assert session.num_in_flight == 0, "both are held"
                held.set()
                await changing
                with pytest.raises(ConfigError, match="make 1003 tokens, an instance holds 256"):
                    await long
                assert (await short).weights_version == 1
                await session.drain()

    play(scenario())
