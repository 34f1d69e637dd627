# SPDX-License-Identifier: Apache-2.0
"""What this process holds, counted exactly, by Python and by the C library.

Resident memory also grows when memory is in pieces.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Mapping

C = ctypes.CDLL(None)


class _MallocCounts(ctypes.Structure):
    _fields_ = [(f"field_{number}", ctypes.c_size_t) for number in range(10)]


def malloc_bytes() -> int:
    """In use in this process, by the C library."""
    if not hasattr(C, "mallinfo2"):
        return 0
    C.mallinfo2.restype = _MallocCounts
    counts = C.mallinfo2()
    return int(counts.field_4 + counts.field_7)  # in blocks of their own, and in arenas


def held() -> dict[str, int]:
    """What this process holds, garbage apart."""
    gc.collect()
    return {
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
        "bytes": malloc_bytes(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def grown_since(before: Mapping[str, int]) -> dict[str, int]:
    """What this process holds now and did not hold then."""
    return {name: count - before[name] for name, count in held().items()}


def may_grow(num_requests: int) -> dict[str, int]:
    """Over so many requests: caches fill now and then, and what is kept of every request shows."""
    return {
        "objects": num_requests // 2,
        "blocks": num_requests // 2,
        "bytes": num_requests * 256,
        "descriptors": 4,
        "threads": 4,
    }
