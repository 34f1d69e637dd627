# SPDX-License-Identifier: Apache-2.0
"""Names for the shared memory and the semaphores of `multiprocessing` that say with which folder they go.

By themselves they have random names, and what a killed process left cannot be told from what another program uses.
After `name_segments_after` they begin with the random part of the name of a folder of owned_folders.py.
"""

from __future__ import annotations

from multiprocessing import process, shared_memory
from pathlib import Path


def name_segments_after(folder: Path) -> None:
    """Have what `multiprocessing` makes in this process from now on removed with a folder.

    Semaphores of processes that it starts through `multiprocessing` are named so too; for their shared memory they must
    call this themselves.
    """
    owner = folder.name.rpartition("-")[2]
    # No public setting exists. Processes inherit the first; the other two are read for every new name.
    vars(process.current_process())["_config"]["semprefix"] = f"/mp-{owner}"
    prefix = f"/psm_{owner}_"
    vars(shared_memory).update(_SHM_NAME_PREFIX=prefix, _SHM_SAFE_NAME_LENGTH=len(prefix) + 8)
