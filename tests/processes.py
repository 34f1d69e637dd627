# SPDX-License-Identifier: Apache-2.0
"""The processes that a process has started, as Linux lists them, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from pathlib import Path

EXIT_DEADLINE_S = 30.0


def children(pid: int) -> list[int]:
    """Processes that it has started and that have not been waited for."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has ended since
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Those, and what they have started."""
    direct = children(pid)
    return direct + [other for child in direct for other in descendants(child)]


async def gone(pids: list[int]) -> bool:
    """Whether all of them end within the deadline."""

    def wait() -> bool:
        for pid in pids:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                if not select.select([handle], [], [], EXIT_DEADLINE_S)[0]:
                    return False
            finally:
                os.close(handle)
        return True

    return await asyncio.to_thread(wait)
