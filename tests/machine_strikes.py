# SPDX-License-Identifier: Apache-2.0
"""What can be done to two machines and the instances on them in the middle of a rollout, for machine_faults_driver.py.

A cut link is up again after CUT_S, a lost node after NODE_BACK_S and the time that Ray takes to start. Links are cut
whole, or in one direction alone: then what is sent goes to a hardware address that no machine has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from seer import Rollout
from seer.errors import SeerError
from seer.hosting.health import Health
from two_machines import address_of, kill_processes, processes_of, ray_environment, ray_start

HERE, THERE = 1, 2
NUM_INSTANCES = 3
"""At the start of every round; there is one place more."""
CUT_S = 8.0
"""Longer than the silence deadline, so that instances are lost, and shorter than Ray takes to notice."""
NODE_BACK_S = 2.0
NODE_STARTS = 8
NO_MACHINE = "02:00:00:00:00:99"
ORPHAN_S = 60.0
INSTANCE_PROCESS = "seer.hosting.child"


class Machines:
    """This machine, the other one, and the fleet over both."""

    def __init__(self, rollout: Rollout, far_pid: int, far_folder: Path) -> None:
        self._rollout = rollout
        self._far_pid = far_pid
        self._far_folder = far_folder
        self._tasks: list[asyncio.Task[None]] = []

    def strikes(self, rng: random.Random) -> dict[str, Callable[[], None]]:
        """By name; each strikes when it is called."""
        return {
            "stop a process": partial(self._signal, rng, signal.SIGSTOP),
            "kill a process": partial(self._signal, rng, signal.SIGKILL),
            "cut the link": partial(self._start, self._cut_link),
            "cut the way there": partial(self._start, partial(self._cut_way, HERE, THERE)),
            "cut the way back": partial(self._start, partial(self._cut_way, THERE, HERE)),
            "lose and restart the node": partial(self._start, self._lose_node),
            "add an instance": partial(self._start, self._add),
            "remove an instance": partial(self._start, partial(self._remove, rng)),
        }

    async def over(self, struck: Sequence[str], num: int) -> None:
        """Until so many have struck and are over; raises what one of them failed by."""
        while len(struck) < num:  # noqa: ASYNC110 - the list is all there is to look at
            await asyncio.sleep(0.05)
        await asyncio.gather(*self._tasks)

    async def settle(self) -> None:
        """Until there are as many instances as at first, all of them are up, and no other process of one is left."""
        await asyncio.gather(*self._tasks)
        self._tasks.clear()
        await self._rollout.fleet.wait_until_up()
        if (num := self._num_wanted()) < NUM_INSTANCES:
            await self._rollout.add_instances(NUM_INSTANCES - num)
        if (num := self._num_wanted()) > NUM_INSTANCES:
            await self._rollout.remove_instances([one.id for one in self._up()[NUM_INSTANCES - num :]])
        async with asyncio.timeout(ORPHAN_S):
            while self._orphans():  # noqa: ASYNC110 - leases end them
                await asyncio.sleep(0.1)

    def _up(self) -> list[Any]:
        return [one for one in self._rollout.fleet.instances if one.is_up]

    def _num_wanted(self) -> int:
        return sum(one.health is not Health.RETIRED for one in self._rollout.fleet.instances)

    def _orphans(self) -> list[int]:
        """Processes of instances, on either machine, that the fleet does not know."""
        known = {one.pid for one in self._rollout.fleet.instances}
        running = processes_of(os.getpid()) | processes_of(self._far_pid)
        return [pid for pid, command in running.items() if INSTANCE_PROCESS in command and pid not in known]

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

        self._tasks.append(asyncio.get_running_loop().create_task(acted()))

    def _at(self, machine: int) -> list[str]:
        return [] if machine == HERE else ["nsenter", "-t", str(self._far_pid), "-m", "-n"]

    async def _cut_link(self) -> None:
        await _run(["ip", "link", "set", "eth0", "down"])
        await asyncio.sleep(CUT_S)
        await _run(["ip", "link", "set", "eth0", "up"])
        await _run(["ip", "route", "replace", "default", "dev", "eth0"])

    async def _cut_way(self, source: int, target: int) -> None:
        neighbour = [*self._at(source), "ip", "neigh"]
        await _run([*neighbour, "replace", address_of(target), "lladdr", NO_MACHINE, "nud", "permanent", "dev", "eth0"])
        await asyncio.sleep(CUT_S)
        with contextlib.suppress(AssertionError):  # a link that went down has forgotten it
            await _run([*neighbour, "del", address_of(target), "dev", "eth0"])

    async def _lose_node(self) -> None:
        await asyncio.to_thread(kill_processes, self._far_pid)
        await _run([*self._at(THERE), "find", "/dev/shm", "-mindepth", "1", "-delete"])  # as a loss of power
        for _ in range(NODE_STARTS):  # the link may be cut
            await asyncio.sleep(NODE_BACK_S)
            with contextlib.suppress(AssertionError):
                await _run(ray_start(self._far_pid, THERE, num_cpus=2, head=HERE, folder=self._far_folder))
                return

    async def _add(self) -> None:
        await self._rollout.add_instances(1)

    async def _remove(self, rng: random.Random) -> None:
        up = self._up()
        if len(up) > 1:
            await self._rollout.remove_instances([rng.choice(up).id])


async def _run(words: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(*words, env=ray_environment(), stdout=subprocess.DEVNULL)
    assert await process.wait() == 0, words
