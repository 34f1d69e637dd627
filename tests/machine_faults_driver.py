# SPDX-License-Identifier: Apache-2.0
"""Rounds of random faults over two machines; run on the first of them by test_machine_faults.py.

    python machine_faults_driver.py MODEL RAY_ADDRESS FAR_PID FAR_FOLDER ROUNDS

FAR_PID is a process that keeps the namespaces of the other machine, FAR_FOLDER is for Ray's files there. The last line
is the tally, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fault_campaign import StrikesAt, Tally, rng_of, tokens_of
from seer import HostingConfig, Rollout, Sampling
from seer.errors import SeerError
from seer.hosting.health import Health
from seer.hosting.ray import placement
from two_machines import kill_processes, ray_environment, ray_start
from two_machines_driver import MovingIsFree

PROMPTS = [[3 + i, 7, 11, 5 + i, 9] for i in range(5)]
SAMPLING = Sampling(max_tokens=64)
HOSTING = HostingConfig(
    pin_cores=False,
    heartbeat_s=0.2,
    silence_deadline_s=4.0,
    lease_deadline_s=10.0,
    start_deadline_s=180.0,
    max_restarts=1000,
)
CUT_S = 8.0
"""Longer than the silence deadline, so that instances are lost, and shorter than Ray takes to notice."""
NODE_BACK_S = 2.0
NODE_STARTS = 8
MAX_INSTANCES = 4
"""As many as both machines have places for."""
ROUND_DEADLINE_S = 150.0
NUM_SEEDS = 3


def a_rollout(model: str, ray: str | None) -> Rollout:
    return Rollout(
        model,
        instances=1 if ray is None else 3,
        kv_blocks=512,
        max_num_seqs=8,
        chunk_tokens=16,
        pool="none" if ray is None else "mooncake",
        pool_bytes=64 << 20,
        hosting=replace(HOSTING, ray=ray),
    )


class Machines:
    """What can be done to the two machines and to what runs on them."""

    def __init__(self, rollout: Rollout, far_pid: int, far_folder: Path) -> None:
        self._rollout = rollout
        self._far_pid = far_pid
        self._far_folder = far_folder
        self.tasks: set[asyncio.Task[None]] = set()

    def strikes(self, rng: random.Random) -> dict[str, Callable[[], None]]:
        """By name; each strikes when it is called."""
        return {
            "stop a process": partial(self._signal, rng, signal.SIGSTOP),
            "kill a process": partial(self._signal, rng, signal.SIGKILL),
            "cut the link here": partial(self._start, partial(self._cut, [])),
            "cut the link there": partial(self._start, partial(self._cut, self._there)),
            "kill and restart the node": partial(self._start, self._lose_node),
            "add an instance": partial(self._start, self._add),
            "remove an instance": partial(self._start, partial(self._remove, rng)),
        }

    @property
    def _there(self) -> list[str]:
        return ["nsenter", "-t", str(self._far_pid), "-m", "-n"]

    def _up(self) -> list[Any]:
        return [one for one in self._rollout.fleet.instances if one.is_up]

    def _signal(self, rng: random.Random, number: signal.Signals) -> None:
        up = self._up()
        pid = rng.choice(up).pid if up else None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _start(self, act: Callable[[], Awaitable[object]]) -> None:
        async def acted() -> None:
            with contextlib.suppress(SeerError):  # a strike may hit what another one is doing
                await act()

        task = asyncio.get_running_loop().create_task(acted())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _cut(self, where: list[str]) -> None:
        await _run([*where, "ip", "link", "set", "eth0", "down"])
        await asyncio.sleep(CUT_S)
        await _run([*where, "ip", "link", "set", "eth0", "up"])
        await _run([*where, "ip", "route", "replace", "default", "dev", "eth0"])

    async def _lose_node(self) -> None:
        await asyncio.to_thread(kill_processes, self._far_pid)
        await _run([*self._there, "find", "/dev/shm", "-mindepth", "1", "-delete"])  # as a loss of power
        for _ in range(NODE_STARTS):  # the link may be cut
            await asyncio.sleep(NODE_BACK_S)
            with contextlib.suppress(AssertionError):
                await _run(ray_start(self._far_pid, 2, num_cpus=2, head=1, folder=self._far_folder))
                return

    async def _add(self) -> None:
        if self._num_wanted() < MAX_INSTANCES:
            await self._rollout.add_instances(1)

    def _num_wanted(self) -> int:
        return sum(one.health is not Health.RETIRED for one in self._rollout.fleet.instances)

    async def _remove(self, rng: random.Random) -> None:
        up = self._up()
        if len(up) > 2:
            await self._rollout.remove_instances([rng.choice(up).id])

    async def settle(self) -> None:
        """Until the strikes are over and at least two instances are up."""
        while self.tasks:
            await asyncio.wait(set(self.tasks))
        if self._num_wanted() < MAX_INSTANCES - 1:
            await self._rollout.add_instances(1)
        while len(self._up()) < 2:  # noqa: ASYNC110 - nothing says when so many are up
            await asyncio.sleep(0.1)


async def _run(words: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(*words, env=ray_environment(), stdout=subprocess.DEVNULL)
    assert await process.wait() == 0, words


async def rounds(rollout: Rollout, machines: Machines, expected: list[Any], tally: Tally, num: int) -> None:
    async with rollout:
        assert rollout.fleet.pool is not None
        rollout.fleet.pool.transfer = MovingIsFree()
        for number in range(num):
            rng = rng_of(tally.test, number)
            kinds = machines.strikes(rng)
            names = [rng.choice(sorted(kinds)) for _ in range(rng.randrange(1, 4))]
            sink = StrikesAt({rng.randrange(2, 60): (name, kinds[name]) for name in names})
            async with asyncio.timeout(ROUND_DEADLINE_S):
                run = rollout.run(PROMPTS, n=4, sampling=SAMPLING, seed=number % NUM_SEEDS, events=sink)
                groups = [group async for group in run]
            tally.check_ends(groups, 0, sink.done)
            tally.compare(tokens_of(groups), expected[number % NUM_SEEDS], sink.done)
            print(f"round {number}: {', '.join(sink.done) or 'nothing'}", flush=True)
            async with asyncio.timeout(ROUND_DEADLINE_S):
                await machines.settle()
        tally.instances_lost = rollout.fleet.num_lost


async def main() -> None:
    model, ray, far_pid, far_folder, num = sys.argv[1:]
    placement.SUSPECT_S = 15.0  # so that the node is used again before the rounds are over
    async with a_rollout(model, None) as alone:
        expected = []
        for seed in range(NUM_SEEDS):
            run = alone.run(PROMPTS, n=4, sampling=SAMPLING, seed=seed)
            expected.append(tokens_of([group async for group in run]))
    tally, rollout = Tally("machines"), a_rollout(model, ray)
    await rounds(rollout, Machines(rollout, int(far_pid), Path(far_folder)), expected, tally, int(num))
    tally.finish()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    asyncio.run(main())
