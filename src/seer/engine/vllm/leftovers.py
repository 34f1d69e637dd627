"""Shared memory that vLLM's processes would leave behind when they are killed.

On a CPU the engine and its worker talk through segments named `psm_*`. Once both have them mapped the names are of no
use to anybody: without a name a segment goes with its last process, however that ends.
"""

from __future__ import annotations

from pathlib import Path

_PREFIX = "/dev/shm/psm_"


def unname_segments(pid: int) -> None:
    """Take the names off the segments that this process has mapped; the memory stays."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith(_PREFIX) and not path.endswith("(deleted)"):
            Path(path).unlink(missing_ok=True)
