# SPDX-License-Identifier: Apache-2.0
"""The processes that a process has started, as Linux lists them."""

from __future__ import annotations

import contextlib
from pathlib import Path


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
