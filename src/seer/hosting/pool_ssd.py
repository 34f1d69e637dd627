# SPDX-License-Identifier: Apache-2.0
"""The SSD tier of a fleet's pool: its size, and its folder.

The folder lies in this user's own folder below the one that was named, and only this user can open it. The driver holds
a lock on it. When a driver was killed, also by a reboot, the next driver that uses the same place removes what is left.

Invariants
  1. The tier takes no more disk than its bytes, and they are reserved before the first block: a full disk is found at
     the start and not in the middle of a run.
  2. After `close` nothing of it is on the disk.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from seer.config import PoolConfig
from seer.errors import ConfigError
from seer.machine import owned_folders

TIMES_DRAM = 4
"""Size of the tier relative to the pool's DRAM. Paused requests far outnumber running ones where an SSD pays."""
FREE_DISK_SHARE = 0.5
"""Of the free disk: the other half is left to results, journals and checkpoints."""
KIND = "pool-ssd"
"""Names of the tier's folders start with it."""


@dataclass(frozen=True, slots=True)
class SsdTier:
    """Where the tier lies, and its size."""

    base: Path
    num_bytes: int

    def open(self) -> Path:
        """A new folder for this driver; removes those of drivers that are gone."""
        return owned_folders.make_folder(KIND, self.base)


def ssd_tier(config: PoolConfig, dram_bytes: int) -> SsdTier | None:
    """The tier that a configuration asks for; None for none."""
    if config.ssd_dir is None:
        return None
    base = config.ssd_dir.absolute()
    if not base.is_dir():
        raise ConfigError(f"pool.ssd_dir={base} is not a folder", hint="create it, or name another")
    if config.ssd_bytes is not None:
        return SsdTier(base, config.ssd_bytes)
    return SsdTier(base, min(TIMES_DRAM * dram_bytes, int(FREE_DISK_SHARE * shutil.disk_usage(base).free)))
