# SPDX-License-Identifier: Apache-2.0
"""Faults for a fleet that is rolling out: one function each, and `STRIKES`, their names."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from faults import damage
from frame_proxy import Disturbance, ProxiedChild
from seer.hosting import ProcessInstance
from seer.hosting.fleet import HostedFleet
from seer.hosting.launch import ChildProcess
from seer.hosting.launcher import LocalChild
from seer.kvpool.local_files import PoolFiles, remove_files

CLOCK_JUMP_S = 120.0
"""Longer than every deadline of an instance, shorter than that of a run that stalls."""
Strike = Callable[[HostedFleet, random.Random], None]


def send(number: signal.Signals, *pids: int | None) -> None:
    """Signal processes; one that an earlier strike ended is left out."""
    for pid in pids:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _pid(fleet: HostedFleet, rng: random.Random) -> int | None:
    return rng.choice(fleet.instances).pid


def later(delay_s: float, action: Callable[[], None]) -> None:
    """In a thread, which no jump of the event loop's clock concerns."""
    timer = threading.Timer(delay_s, action)
    timer.daemon = True
    timer.start()


def kill_an_instance(fleet: HostedFleet, rng: random.Random) -> None:
    send(signal.SIGKILL, _pid(fleet, rng))


def kill_all_instances(fleet: HostedFleet, rng: random.Random) -> None:
    send(signal.SIGKILL, *(instance.pid for instance in fleet.instances))


def stop_an_instance(fleet: HostedFleet, rng: random.Random) -> None:
    send(signal.SIGSTOP, _pid(fleet, rng))


def stop_and_resume_an_instance(fleet: HostedFleet, rng: random.Random) -> None:
    pid = _pid(fleet, rng)
    send(signal.SIGSTOP, pid)
    later(rng.uniform(0.1, 1.0), lambda: send(signal.SIGCONT, pid))


def slow_an_instance_down(fleet: HostedFleet, rng: random.Random) -> None:
    """For a second it runs a tenth of the time."""
    pid = _pid(fleet, rng)

    def slow_down() -> None:
        for _ in range(20):
            send(signal.SIGSTOP, pid)
            time.sleep(0.045)
            send(signal.SIGCONT, pid)
            time.sleep(0.005)

    later(0.0, slow_down)


def take_memory_from_an_instance(fleet: HostedFleet, rng: random.Random) -> None:
    """It gets no more than it has: what it asks for next fails."""
    pid = _pid(fleet, rng)
    with contextlib.suppress(OSError, TypeError):
        found = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        if pid is not None and found is not None:
            resource.prlimit(pid, resource.RLIMIT_DATA, (int(found[1]) * 1024, resource.RLIM_INFINITY))


def _draft_server(fleet: HostedFleet) -> int | None:
    return fleet.draft_servers.processes[0].pid if fleet.draft_servers else None


def kill_the_draft_server(fleet: HostedFleet, rng: random.Random) -> None:
    send(signal.SIGKILL, _draft_server(fleet))


def stop_and_resume_the_draft_server(fleet: HostedFleet, rng: random.Random) -> None:
    pid = _draft_server(fleet)
    send(signal.SIGSTOP, pid)
    later(rng.uniform(0.1, 3.0), lambda: send(signal.SIGCONT, pid))


def damage_the_pool_memory(fleet: HostedFleet, rng: random.Random) -> None:
    if fleet.pool is not None:
        damage(fleet.pool)


def _files(fleet: HostedFleet) -> PoolFiles | None:
    return PoolFiles.find(fleet.pool.settings["name"], "/dev/shm") if fleet.pool is not None else None


def damage_the_pool_file(fleet: HostedFleet, rng: random.Random) -> None:
    """Overwrite a byte in every 512 of the SSD tier."""
    files = _files(fleet)
    slab = files.slab() if files is not None else ""
    with contextlib.suppress(OSError):
        if slab and os.path.getsize(slab):
            with open(slab, "r+b") as file:
                for at in range(0, os.path.getsize(slab), 512):
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 0x55]))


def overwrite_the_pool_note(fleet: HostedFleet, rng: random.Random) -> None:
    files = _files(fleet)
    if files is not None and files.note.exists():
        files.note.write_bytes(rng.randbytes(40))


def remove_the_pool(fleet: HostedFleet, rng: random.Random) -> None:
    files = _files(fleet)
    if files is not None:
        remove_files(files)


def jump_the_clock(fleet: HostedFleet, rng: random.Random) -> None:
    """The driver's clock goes forward, as after the machine was suspended."""
    loop = asyncio.get_running_loop()
    jumps: list[float] = vars(loop).setdefault("_jumps", [])
    jumps.append(CLOCK_JUMP_S)
    ahead_s = sum(jumps)
    loop.time = lambda: time.monotonic() + ahead_s  # type: ignore[method-assign]


def _disturb(what: Disturbance) -> Strike:
    def strike(fleet: HostedFleet, rng: random.Random) -> None:
        direction: Literal["up", "down"] = rng.choice(["up", "down"])
        disturb_messages(rng.choice(fleet.instances), direction, what)

    return strike


def disturb_messages(instance: ProcessInstance, direction: Literal["up", "down"], what: Disturbance) -> None:
    child = process_of(instance)
    if isinstance(child, ProxiedChild):
        child.proxy.disturb(direction, what)


def process_of(instance: ProcessInstance) -> ChildProcess | None:
    """The process of an instance of this machine, while there is one."""
    return instance._child._process if isinstance(instance._child, LocalChild) else None


def stacks_of(fleet: HostedFleet) -> str:
    """Where the instances' processes are, by what faulthandler writes into their logs when they abort."""
    said = []
    for instance in fleet.instances:
        child = process_of(instance)
        if child is not None:
            send(signal.SIGCONT, child.pid)
            send(signal.SIGABRT, child.pid)
            time.sleep(2.0)
            size = os.fstat(child._log.fileno()).st_size
            said.append(os.pread(child._log.fileno(), 6000, max(0, size - 6000)).decode(errors="replace"))
        said.append(f"instance {instance.id}: {instance._state}, restarting {instance._is_restarting}")
    return "\n".join(said)


STRIKES: dict[str, Strike] = {
    "kill an instance": kill_an_instance,
    "kill all instances": kill_all_instances,
    "stop an instance": stop_an_instance,
    "stop and resume an instance": stop_and_resume_an_instance,
    "slow an instance down": slow_an_instance_down,
    "take memory from an instance": take_memory_from_an_instance,
    "kill the draft server": kill_the_draft_server,
    "stop and resume the draft server": stop_and_resume_the_draft_server,
    "damage the pool's memory": damage_the_pool_memory,
    "damage the pool's file": damage_the_pool_file,
    "overwrite the pool's note": overwrite_the_pool_note,
    "remove the pool": remove_the_pool,
    "jump the driver's clock": jump_the_clock,
    **{f"{what} a message": _disturb(what) for what in ("delay", "double", "drop")},
    "reorder messages": _disturb("reorder"),
}
