# SPDX-License-Identifier: Apache-2.0
"""How long a process was ready to run and got no core: silence on a busy machine is not the process's own.

Linux counts for every thread how long it waited for a core (`schedstat`). A process that was stopped, that sleeps, or
whose core it has, does not wait: its silence counts in full.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_PROC = Path("/proc")


class Starvation:
    """Waiting times of one process and its descendants, from one look to the next."""

    def __init__(self, pid: int, proc: Path = _PROC) -> None:
        self._pid = pid
        self._proc = proc
        self._waits_s: dict[str, float] = {}

    def growth_s(self) -> float:
        """The longest time that one thread waited for a core since the last call; 0 at the first."""
        before, self._waits_s = self._waits_s, dict(self._read(self._pid))
        return max((wait_s - before.get(thread, wait_s) for thread, wait_s in self._waits_s.items()), default=0.0)

    def _read(self, pid: int) -> list[tuple[str, float]]:
        tasks = self._proc / str(pid) / "task"
        found: list[tuple[str, float]] = []
        with contextlib.suppress(OSError):  # the process has ended
            for thread in os.listdir(tasks):
                with contextlib.suppress(OSError, ValueError):  # the thread has ended, or this kernel does not count
                    _, waited_ns, _ = (tasks / thread / "schedstat").read_text().split()
                    found.append((thread, int(waited_ns) / 1e9))
                    for child in (tasks / thread / "children").read_text().split():
                        found += self._read(int(child))
        return found
