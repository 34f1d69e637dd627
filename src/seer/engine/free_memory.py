# SPDX-License-Identifier: Apache-2.0
"""Free system memory, for default sizes."""

from __future__ import annotations

import os


def free_memory_bytes() -> int:
    """Free memory of this machine; page caches count as used."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
