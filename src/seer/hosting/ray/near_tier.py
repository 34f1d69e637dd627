# SPDX-License-Identifier: Apache-2.0
"""The near tier of a node: a local pool that the node's agent makes for the instances there, and frees.

Invariants
  1. A node without room in shared memory has no near tier; its instances then use the store between nodes alone.
  2. A failure of the near tier after its start is logged and fails nothing.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from seer.errors import SeerError

if TYPE_CHECKING:
    from seer.hosting.fleet_pool import FleetPool

log = logging.getLogger(__name__)

MIN_BLOCKS = 64
"""Fewer would hold no request's KV."""


class NearTier:
    """None until `start`."""

    def __init__(self) -> None:
        self._pool: FleetPool | None = None

    def start(self, num_bytes: int, block_bytes: int) -> int:
        """Make it, of so many bytes at most; returns how many it takes, 0 if there is no room."""
        from seer.hosting.fleet_pool import DRAM_DIR, FREE_SHARE, FleetPool

        num_bytes = min(num_bytes, int(FREE_SHARE * shutil.disk_usage(DRAM_DIR).free))
        if num_bytes < MIN_BLOCKS * block_bytes:
            log.warning("no near tier: %d bytes of shared memory are left for it", num_bytes)
            return 0
        pool = FleetPool.local(block_bytes=block_bytes, block_size=1, dram_bytes=num_bytes)
        try:
            pool.start()
        except (SeerError, OSError) as error:
            log.warning("no near tier: %s", error)
            return 0
        self._pool = pool
        return num_bytes

    def settings(self) -> dict[str, Any]:
        """What an instance on this node adds to its settings of the pool."""
        return {"near": self._pool.settings} if self._pool is not None else {}

    def tidy(self, requests: Sequence[int], weights_versions: Sequence[int]) -> None:
        """Free the KV of requests that ended and of old weights."""
        if self._pool is not None:
            for weights_version in weights_versions:
                self._pool.drop_weights_version(weights_version)
            for request in requests:
                self._pool.free(request)

    def close(self) -> None:
        """Remove it."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
