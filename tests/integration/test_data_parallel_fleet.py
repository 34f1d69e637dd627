# SPDX-License-Identifier: Apache-2.0
"""Instances that share experts, in a fleet of processes without a model: they start, are lost and leave together."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from seer import HostingConfig, Rollout, Sampling
from seer.errors import ConfigError, InputError, InstanceError
from seer.hosting import ProcessInstance
from seer.hosting.devices import InstanceDevices
from seer.hosting.health import Health
from seer.hosting.rank_group import Member, RankGroup
from seer.hosting.restart_budget import RestartBudget
from seer.metrics.events import Event, Started

DEADLINE_S = 120.0
SAMPLING = Sampling(max_tokens=60)
PROMPTS = [[1, 2, 3 + i] for i in range(4)]
Tokens = dict[tuple[int, int], list[int]]


def a_rollout(instances: int, log_dir: Path, *, restart_pause_s: float = 0.0, **settings: Any) -> Rollout:
    hosting = HostingConfig(
        pin_cores=False, heartbeat_s=0.1, silence_deadline_s=600.0, restart_pause_s=restart_pause_s, log_dir=log_dir
    )
    settings = {"engine_settings": {"step_s": 0.001}} | settings
    rollout = Rollout("none", engine="fake", instances=instances, data_parallel=2, hosting=hosting, **settings)
    object.__setattr__(rollout.engine, "factory", "host_fakes:make_rank")
    return rollout


def play(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, DEADLINE_S))


def starts(log_dir: Path, instance: int) -> list[str]:
    """What each start of an instance was told."""
    lines = (log_dir / f"instance-{instance}.log").read_text().splitlines()
    return [line for line in lines if line.startswith("rank ")]


async def rolled_out(rollout: Rollout, **settings: Any) -> Tokens:
    groups = [group async for group in rollout.run(PROMPTS, n=4, sampling=SAMPLING, seed=7, **settings)]
    return {(r.group, r.index): r.token_ids for group in groups for r in group.responses if r.is_complete}


class KillOnce:
    """Kills an instance when it gets its second chunk."""

    def __init__(self, rollout: Rollout, instance: int) -> None:
        self._rollout, self._instance, self._num_chunks = rollout, instance, 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started) and event.instance == self._instance:
            self._num_chunks += 1
            if self._num_chunks == 2:
                os.kill(self._rollout.fleet.instances[self._instance].pid or 0, signal.SIGKILL)


def test_a_rank_that_dies_takes_its_own_group_along_and_both_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(4, tmp_path) as rollout:
            undisturbed = await rolled_out(rollout)
            assert len(undisturbed) == 16
            assert await rolled_out(rollout, events=KillOnce(rollout, 1)) == undisturbed
            await rollout.fleet.wait_until_up()
            assert [status.num_lost for status in rollout.fleet.view()] == [1, 1, 0, 0]
            assert await rolled_out(rollout) == undisturbed

    play(scenario())
    first, second, other, last = (starts(tmp_path, instance) for instance in range(4))
    assert [line.partition(" at ")[0] for line in first + second] == ["rank 0 of 2"] * 2 + ["rank 1 of 2"] * 2
    places = [line.partition(" at ")[2] for line in first]
    assert places == [line.partition(" at ")[2] for line in second], "each start meets at one place"
    assert len(other) == len(last) == 1


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The instances that told the others that they do not start."""
    told: list[int] = []
    not_started = RankGroup.not_started

    def note(group: RankGroup, member: Member, reason: str) -> None:
        told.append(member.id)
        not_started(group, member, reason)

    monkeypatch.setattr(RankGroup, "not_started", note)
    return told


def test_a_rank_that_cannot_start_is_the_one_whose_error_is_shown(tmp_path: Path, failed: list[int]) -> None:
    (tmp_path / "broken-1").touch()

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="instance 1: this GPU is broken"):
            async with a_rollout(2, tmp_path):
                pass

    play(scenario())
    assert failed == [1], "the other was ended: it must not end those that wait for the next start"


def test_a_rank_that_does_not_start_again_at_once_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(2, tmp_path) as rollout:
            (tmp_path / "broken-0").touch()
            os.kill(rollout.fleet.instances[1].pid or 0, signal.SIGKILL)
            while rollout.fleet.num_lost < 2:  # noqa: ASYNC110 - nothing says when it is noticed
                await asyncio.sleep(0)
            await rollout.fleet.wait_until_up()
            assert len(await rolled_out(rollout)) == 16

    play(scenario())
    first, second = starts(tmp_path, 0), starts(tmp_path, 1)
    places = [line.partition(" at ")[2] for line in first]
    assert len(set(places)) == 3, "a start that failed has used its port up"
    # The second was ended with the first, perhaps before it wrote anything.
    assert [line.partition(" at ")[2] for line in (second[0], second[-1])] == [places[0], places[2]]


def test_a_rank_whose_process_cannot_be_made_is_not_waited_for(tmp_path: Path, failed: list[int]) -> None:
    (tmp_path / "instance-1.log").mkdir()  # no log can be written there

    async def scenario() -> None:
        with pytest.raises(InputError, match=r"instance-1\.log cannot be written"):
            async with a_rollout(2, tmp_path):
                pass

    play(scenario())
    assert failed == [1]


async def alone_at_the_meeting(rollout: Rollout, log_dir: Path) -> ProcessInstance:
    """Instance 0 after the death of instance 1, which cannot be restarted: the process of 0 is there, and waits."""
    first, second = rollout.fleet.instances
    old = first.pid
    log = log_dir / "instance-1.log"
    log.rename(log_dir / "earlier.log")
    log.mkdir()
    os.kill(second.pid or 0, signal.SIGKILL)
    while first.pid in (old, None) or first._ranks is None or first._ranks._next is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return first


def test_the_death_of_a_rank_that_waits_for_the_others_is_noticed_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(2, tmp_path) as rollout:
            rollout.fleet._supervisor._budgets[0] = RestartBudget(100, 0.0)
            waiting = await alone_at_the_meeting(rollout, tmp_path)
            pid = waiting.pid
            assert pid is not None, "it waits"
            os.kill(pid, signal.SIGKILL)
            while waiting.pid in (pid, None):  # noqa: ASYNC110 - nothing says when it is launched again
                await asyncio.sleep(0.01)

    play(scenario())


def test_an_instance_that_is_closed_while_it_waits_for_others_waits_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        rollout = a_rollout(2, tmp_path)
        first, _ = rollout.fleet._new_instances(0, rollout.engine, [InstanceDevices()] * 2)
        starting = asyncio.create_task(first.start(lambda output: None))
        while first.pid is None:  # noqa: ASYNC110 - nothing says when it is there
            await asyncio.sleep(0.01)
        await first.close()
        with pytest.raises(InstanceError, match="instance 0 was closed while it started"):
            await starting

    play(scenario())


def test_without_a_rank_that_may_be_restarted_the_run_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(2, tmp_path) as rollout:
            budget = rollout.fleet._supervisor._budgets[0] = RestartBudget(100, 0.0)  # far more than instance 1 has
            await alone_at_the_meeting(rollout, tmp_path)
            while rollout.fleet._failure is None:  # noqa: ASYNC110 - there is no run to hear of it
                await asyncio.sleep(0.01)
            assert budget.pause_s(asyncio.get_running_loop().time()) is not None, "instance 0 is being restarted"
            with pytest.raises(InstanceError, match="no instance is left; the last one lost was instance 1"):
                await rolled_out(rollout)

    play(scenario())


def test_a_program_that_ends_while_a_rank_waits_ends_all_that_is_left(tmp_path: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from test_data_parallel_fleet import a_rollout, alone_at_the_meeting

async def begin(rollout):
    await rollout.__aenter__()
    await alone_at_the_meeting(rollout, Path({str(tmp_path)!r}))

loop = asyncio.new_event_loop()
loop.run_until_complete(begin(a_rollout(2, Path({str(tmp_path)!r}), restart_pause_s=600.0)))
loop.close()
"""
    folders = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": folders},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert "atexit" not in ended.stderr, "what is called then has an error"


def test_groups_join_and_leave_as_a_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(2, tmp_path) as rollout:
            with pytest.raises(ConfigError, match="1 more instances, and 2 share experts"):
                await rollout.add_instances(1)
            assert await rollout.add_instances(2) == [2, 3]
            with pytest.raises(ConfigError, match=r"instance 1 shares experts with \[0\], which would stay"):
                await rollout.remove_instances([1])
            await rollout.remove_instances([0, 1])
            assert len(await rolled_out(rollout, events=KillOnce(rollout, 3))) == 16
            await rollout.fleet.wait_until_up()
            view = rollout.fleet.view()
            assert [status.health for status in view[:2]] == [Health.RETIRED] * 2
            assert [status.num_lost for status in view] == [0, 0, 1, 1]

    play(scenario())
    assert [line.partition(" at ")[0] for line in starts(tmp_path, 2)] == ["rank 0 of 2"] * 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"instances": 3}, "instances=3 is no multiple of data_parallel=2"),
        ({"instances": 2, "engine": "local"}, "engine 'local' has no models with experts"),
        ({"instances": 2, "device": "cuda", "share_gpus": True}, "data_parallel=2 and share_gpus"),
        ({"instances": 2, "data_parallel": 0}, "data_parallel"),
    ],
)
def test_what_cannot_share_experts_is_refused_before_anything_starts(settings: dict[str, Any], why: str) -> None:
    given: dict[str, Any] = {"engine": "fake", "data_parallel": 2} | settings
    with pytest.raises(ConfigError, match=why):
        Rollout("none", **given)
