# SPDX-License-Identifier: Apache-2.0
"""What killed runs left in shared memory and among the temporary files of this user: `seer doctor --clean` removes it.

A run that ends in any other way removes its files itself, and the next run removes what a killed one left.

Invariant: nothing is removed that a living process holds the lock of, or has open.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from seer.kvpool.local_files import all_files, find_pools, reclaim_stale
from seer.machine.owned_folders import remove_orphans
from seer.machine.private_files import SHARED_MEMORY, find_folder


def remove_leftovers(shared_memory: Path = SHARED_MEMORY, temporary: Path | None = None) -> list[str]:
    """Remove them; returns what was removed, in words."""
    gone = []
    for base in {shared_memory, temporary or Path(tempfile.gettempdir())}:
        home = find_folder(base)
        if home is not None:
            gone += [f"folder {path}" for path in remove_orphans(home)]
    if shared_memory.is_dir():
        gone += _remove_pools(str(shared_memory))
    return sorted(gone)


def _remove_pools(dram_dir: str) -> list[str]:
    before = {files.name for files in all_files(dram_dir)}
    num_bytes = {pool.name: pool.file_bytes for pool in find_pools(dram_dir)}
    reclaim_stale(dram_dir, least_age_s=0.0)
    gone = before - {files.name for files in all_files(dram_dir)}
    return [f"pool {name} ({num_bytes.get(name, 0) / 2**20:,.1f} MiB)" for name in gone]
