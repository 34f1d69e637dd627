"""How much main memory nobody uses: what sizes that nobody gave are taken from."""

from __future__ import annotations

import os


def free_memory_bytes() -> int:
    """Of this machine, what others have cached not counted."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
