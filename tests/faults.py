# SPDX-License-Identifier: Apache-2.0
"""Faults that tests inject into a running rollout."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

from seer.hosting import ProcessInstance
from seer.hosting.fleet_pool import FleetPool
from seer.kvpool.local import LocalPool
from seer.metrics.events import Event, Stopped


class KillOnce:
    """An event sink that kills an instance's process, once: at the first chunk to end of a request after `request`.

    Once, because events go on while the driver has not noticed the death yet, and the process id is then nobody's.
    """

    def __init__(self, victim: ProcessInstance, *, request: int = -1) -> None:
        self._victim = victim
        self._request = request
        self._done = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stopped) and event.request > self._request and not self._done and self._victim.is_up:
            assert self._victim.pid is not None
            self._done = True
            os.kill(self._victim.pid, signal.SIGKILL)


def damage(pool: FleetPool) -> None:
    """Overwrite a byte in every 512 of every block in the arena, as a stray pointer would."""
    local = pool._handle
    assert isinstance(local, LocalPool)
    if not local._files.arena.exists():
        return
    with open(local._files.arena, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        start, length = local._open_arena().regions()["data"]
        for at in range(start, start + length, 512):
            memory[at] ^= 0x55


def children_of(run_dir: Path) -> list[int]:
    """Processes that have this run's instance logs open."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                files = [os.readlink(fd) for fd in (process / "fd").iterdir()]
            except OSError:
                continue
            if any(file.startswith(f"{run_dir}/instance-") for file in files):
                found.append(int(process.name))
    return found
