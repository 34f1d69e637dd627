# SPDX-License-Identifier: Apache-2.0
"""Removes shared memory that vLLM's processes would leave behind when they are killed.

On a CPU the engine and its worker talk through segments named `psm_*`. Once both have mapped them, the names are not
needed: the system frees a segment without a name when its last process ends, however it ends.
"""

from __future__ import annotations

from pathlib import Path

_PREFIX = "/dev/shm/psm_"
"""The names that Python's `multiprocessing.shared_memory` gives."""


def unname_segments(pid: int) -> None:
    """Remove the names of the segments that a process has mapped; the memory stays."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith(_PREFIX) and not path.endswith("(deleted)"):
            Path(path).unlink(missing_ok=True)
