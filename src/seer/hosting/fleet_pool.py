"""The KV pool of a fleet, seen from its driver: what instances are told of it, and the end of what it holds.

A request's blocks are pinned in the pool while the request lives, whichever instance put them there; nobody
but the driver sees every way in which a request can end. So the driver frees them.

Invariants
  1. When a request has ended, however it did, none of its blocks is pinned (`local`; see below).
  2. After a weight update no block of the old weights version takes up room.
  3. After `close` nothing of a pool that was made for this fleet is left.
  4. A pool that fails costs time, never the run: all but opening it is logged and survived.

With `mooncake` pins belong to the process that put a block and evict like any other, so there 1 is void; the
store outlives the fleet, so there 3 is void too.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from pathlib import Path
from typing import Any, Literal

from seer.engine.free_memory import free_memory_bytes
from seer.errors import ConfigError, PoolError
from seer.kvpool.base import Pool, PoolStats
from seer.kvpool.open_pool import open_pool
from seer.transfer import TransferCosts, TransferEstimate

log = logging.getLogger(__name__)

PoolBackend = Literal["local", "mooncake", "none"]
POOL_BACKENDS = ("local", "mooncake", "none")
DEADLINE_S = 2.0
PREFIX = "rollout"
DRAM_DIR = "/dev/shm"


UNKNOWN_KV_BYTES = 4 << 30
"""Of an instance that measures its KV memory only when it starts."""
PAUSED_SHARE = 1.0
"""KV of paused requests that the pool has room for, over that of running ones. Blocks of both are in it: one that finds
no room is computed again when its request is resumed elsewhere, and on a CPU that costs more than pausing gained."""
FREE_SHARE = 0.5


def default_pool_bytes(kv_bytes: int | None, num_instances: int) -> int:
    """A size for the pool of instances with so much KV memory each, within what this machine has free.

    Memory is taken when it is first written to, so a pool that stays half empty costs half.
    """
    wanted = int((1.0 + PAUSED_SHARE) * num_instances * (kv_bytes or UNKNOWN_KV_BYTES))
    free = min(shutil.disk_usage(DRAM_DIR).free, free_memory_bytes())
    return min(wanted, int(FREE_SHARE * free))


class FleetPool:
    """One pool, from before the instances start until after they ended."""

    def __init__(self, settings: dict[str, Any], *, bytes_per_token: int, is_ours: bool) -> None:
        self.settings = settings
        """For `open_pool` in every process."""
        self._is_ours = is_ours
        self._handle: Pool | None = None
        self.transfer = TransferEstimate(TransferCosts(bytes_per_token=bytes_per_token))
        """What moving KV through it, and computing it instead, have been measured to cost."""

    @classmethod
    def local(cls, *, block_bytes: int, block_size: int, dram_bytes: int) -> FleetPool:
        """A pool of this fleet's own, in shared memory."""
        settings = {
            "name": f"{PREFIX}-{os.getpid()}-{secrets.token_hex(4)}",
            "block_bytes": block_bytes,
            "dram_bytes": dram_bytes,
            "deadline_s": DEADLINE_S,
            "populate": False,
        }
        return cls(settings, bytes_per_token=block_bytes // block_size, is_ours=True)

    @classmethod
    def mooncake(cls, name: str, *, block_bytes: int, block_size: int) -> FleetPool:
        """A store that `seer pool up --backend mooncake` started."""
        from seer.kvpool.supervise import find_state

        state = find_state(name, DRAM_DIR)
        if state is None or state.backend != "mooncake":
            raise ConfigError(
                f"there is no Mooncake pool named {name!r}",
                hint=f"seer pool up --backend mooncake --name {name} --dram 1GiB",
            )
        settings = {
            "backend": "mooncake",
            "owner_address": state.addresses["owner"],
            "metrics_address": state.addresses["metrics"],
            "block_bytes": block_bytes,
            "deadline_s": DEADLINE_S,
        }
        return cls(settings, bytes_per_token=block_bytes // block_size, is_ours=False)

    def start(self) -> None:
        """Make it, or join it."""
        if self._is_ours:
            remove_orphaned_pools()
            self._handle = open_pool(self.settings | {"keeper": False})  # instances keep house, they have the time

    def free(self, request: int) -> None:
        """The request has ended: its blocks may make room for others."""
        if self._handle is not None:
            self._handle.free(str(request))

    def drop_weights_version(self, weights_version: int) -> None:
        """The weights changed: what the old ones computed is of no use."""
        if self._handle is None:
            return
        try:
            self._handle.drop_weights_version(weights_version)
        except (
            PoolError
        ) as error:  # the keys carry the weights version, so nothing stale can be read; it only takes up room
            log.warning("the pool keeps the KV of weights version %d: %s", weights_version, error)

    def stats(self) -> PoolStats | None:
        """What it holds and did, over all processes; None where only the instances know."""
        if self._handle is None:
            return None
        try:
            return self._handle.stats()
        except PoolError as error:
            log.warning("the pool does not say how it is doing: %s", error)
            return None

    def close(self) -> None:
        """Leave it, and remove what was made for this fleet."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None
        if self._is_ours:
            _remove(self.settings["name"])


def remove_orphaned_pools() -> None:
    """Give back the shared memory of drivers that were killed: their pools carry their process id."""
    from seer.kvpool.local_files import find_pools

    for pool in find_pools():
        prefix, _, rest = pool.name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == PREFIX and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            log.warning("removing pool %s: its driver is gone", pool.name)
            _remove(pool.name)


def _remove(name: str) -> None:
    from seer.kvpool.local_files import PoolFiles, remove_files

    files = PoolFiles.named(name, DRAM_DIR)
    remove_files(files)
    files.lock.unlink(missing_ok=True)  # the name was ours alone, so nobody waits for it
