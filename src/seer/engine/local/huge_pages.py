"""Ask Linux to back large, long-lived memory with huge pages.

Weights and KV are read from end to end at every step, and with pages of 4 KiB a good part of the time goes into
finding them: SmolLM2 at batch 32 on one EPYC core generates 10% faster this way. It is advice: where the kernel
is too old or has no huge page to give, nothing changes but the speed, so failures are not reported.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

HUGE_PAGE_BYTES = 2 << 20
_HUGEPAGE, _COLLAPSE = 14, 25
"""MADV_HUGEPAGE: for pages yet to be touched. MADV_COLLAPSE (Linux 6.1): for those that have been."""

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def zeros(num_bytes: int) -> memoryview:
    """Zeroed memory in huge pages, aligned to them; pages that are never touched cost nothing."""
    pages = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    skipped = -start % HUGE_PAGE_BYTES
    ask(start + skipped, num_bytes, touched=False)
    return memoryview(pages)[skipped : skipped + num_bytes]


def ask(address: int, num_bytes: int, *, touched: bool) -> None:
    """Back this memory with huge pages, and its neighbours within the first and last of them.

    Memory not `touched` yet stays free until it is.
    """
    if _libc is None or num_bytes < HUGE_PAGE_BYTES // 2:
        return
    start = address // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    length = -(-(address + num_bytes - start) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    for advice in (_HUGEPAGE, _COLLAPSE) if touched else (_HUGEPAGE,):
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
