# SPDX-License-Identifier: Apache-2.0
"""The KV pool of a fleet, as its driver uses it: settings for the instances, and freeing what it holds.

A request's blocks are pinned in the pool until the request ends, whichever instance saved them. Only the driver sees
every way a request can end, so the driver frees them.

Invariants
  1. No block of a request that has ended is pinned (`local` only).
  2. After a weight update the pool drops all blocks of the old weights version (`local` only).
  3. After `close` nothing of a pool that was made for this fleet is left (`local` only).
  4. The driver holds the pool's owner lock from `start` to `close`. A rollout's pool without it is an orphan, whatever
     process ids say: a driver in another container has one that means nothing here.
  5. A pool that fails after it was opened never fails the run: the error is logged.

A Mooncake store outlives the fleet, and its blocks belong to the processes that put them: the driver has no handle of
it, and its eviction makes room. Keys carry the weights version, so old blocks are never read. Over several nodes, the
driver has the near tier of each node freed by that node's agent.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from seer.engine.free_memory import free_memory_bytes
from seer.errors import ConfigError, PoolError
from seer.hosting.pool_ssd import SsdTier
from seer.hosting.ray.pool import NodesPool
from seer.kvpool.base import Pool, PoolStats, part_owner
from seer.kvpool.mooncake_servers import MooncakeProtocol
from seer.kvpool.open_pool import open_pool
from seer.machine import file_lock, owned_folders
from seer.metrics.events import Stepped
from seer.transfer import TransferCosts, TransferEstimate

log = logging.getLogger(__name__)

DEADLINE_S = 2.0
"""Limit of one pool call; after it a block counts as missing and is computed. Short next to a chunk, long enough for a
busy machine."""
PREFIX = "rollout"
"""Pools made by a driver start with this name; `remove_orphaned_pools` looks for it."""
DRAM_DIR = "/dev/shm"
"""Where Linux mounts shared memory."""

UNKNOWN_KV_BYTES = 4 << 30
"""KV memory assumed for an instance that measures its own only when it starts."""
PAUSED_SHARE = 1.0
"""KV of paused requests that the pool has room for, relative to that of running ones. The pool holds blocks of both. A
block that finds no room is computed again when its request resumes on another instance."""
FREE_SHARE = 0.5
"""Of the free memory: the other half is left to weights, prompts and responses."""

PREFETCH_SHARE = 0.25
"""Of the DRAM of a pool with an SSD tier, for KV of requests that run next. The rest is for KV that was just saved."""


def wanted_pool_bytes(kv_bytes: int | None, num_instances: int) -> int:
    """A pool size for instances with `kv_bytes` of KV memory each."""
    return int((1.0 + PAUSED_SHARE) * num_instances * (kv_bytes or UNKNOWN_KV_BYTES))


def default_pool_bytes(kv_bytes: int | None, num_instances: int) -> int:
    """The size that is wanted, within the machine's free memory.

    Memory is taken when it is first written, so a half-empty pool takes half.
    """
    wanted = wanted_pool_bytes(kv_bytes, num_instances)
    free = min(shutil.disk_usage(DRAM_DIR).free, free_memory_bytes())
    return min(wanted, int(FREE_SHARE * free))


class FleetPool:
    """One pool; it opens before the instances start and closes after they end."""

    def __init__(
        self, settings: dict[str, Any], *, bytes_per_token: int, is_ours: bool, ssd: SsdTier | None = None
    ) -> None:
        self.settings = settings
        """For `open_pool` in every process."""
        self.between_nodes: NodesPool | None = None
        """The store that a fleet on several machines makes for itself; each machine adds its own way in."""
        self._is_ours = is_ours
        self._ssd = ssd
        self._ssd_folder: Path | None = None
        self._handle: Pool | None = None
        self._owner: file_lock.FileLock | None = None
        ahead = 0 if ssd is None else int(PREFETCH_SHARE * settings["dram_bytes"] / bytes_per_token)
        self.transfer = TransferEstimate(TransferCosts(bytes_per_token=bytes_per_token, prefetch_tokens=ahead))
        """Measured costs of moving KV through the pool and of computing it instead."""

    @classmethod
    def local(
        cls, *, block_bytes: int, block_size: int, num_ranks: int = 1, dram_bytes: int, ssd: SsdTier | None = None
    ) -> FleetPool:
        """A new pool in shared memory, over an SSD tier where one is given, for this fleet alone.

        `block_bytes` are those of each rank.
        """
        settings = {
            "name": f"{PREFIX}-{os.getpid()}-{secrets.token_hex(4)}",
            "block_bytes": block_bytes,
            "dram_bytes": dram_bytes,
            "deadline_s": DEADLINE_S,
            "populate": False,
        }
        bytes_per_token = num_ranks * block_bytes // block_size
        return cls(settings, bytes_per_token=bytes_per_token, is_ours=True, ssd=ssd)

    @classmethod
    def mooncake(cls, name: str, *, block_bytes: int, block_size: int, num_ranks: int = 1) -> FleetPool:
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
        return cls(settings, bytes_per_token=num_ranks * block_bytes // block_size, is_ours=False)

    @classmethod
    def between(
        cls,
        node_bytes: int,
        *,
        block_bytes: int,
        block_size: int,
        num_ranks: int = 1,
        protocol: MooncakeProtocol = "auto",
    ) -> FleetPool:
        """A Mooncake store over the machines of a fleet, with so much memory of each at most."""
        settings = {"backend": "mooncake", "block_bytes": block_bytes, "deadline_s": DEADLINE_S}
        pool = cls(settings, bytes_per_token=num_ranks * block_bytes // block_size, is_ours=False)
        pool.between_nodes = NodesPool(node_bytes, block_bytes=block_bytes, protocol=protocol)
        return pool

    def start(self) -> None:
        """Make the pool; a Mooncake store is running already."""
        if self._is_ours:
            from seer.kvpool.local_files import PoolFiles

            remove_orphaned_pools()
            self._owner = file_lock.FileLock.acquire(PoolFiles.named(self.settings["name"], DRAM_DIR).owner)
            assert self._owner is not None, "a pool's name is unique"
            try:
                if self._ssd is not None:
                    self._ssd_folder = self._ssd.open()
                    self.settings |= {"ssd_dir": str(self._ssd_folder), "ssd_bytes": self._ssd.num_bytes}
                self._handle = open_pool(self.settings | {"keeper": False})  # the instances run the keeper
                self.settings |= {"must_exist": True}  # an instance that starts late must not make it again
            except BaseException:
                self.close()
                raise

    def free(self, request: int) -> None:
        """Unpin the blocks of a request that has ended."""
        if self._handle is not None:
            self._handle.free(str(request))
            self._handle.free(part_owner(str(request)))
        elif self.between_nodes is not None:
            self.between_nodes.free(request)

    def saw_steps(self, steps: Stepped) -> None:
        """Learn what moving and computing KV costs."""
        near_bytes = steps.loaded_bytes - steps.far_loaded_bytes
        near_s = steps.load_s + steps.overlapped_load_s - steps.far_load_s
        if self.between_nodes is None:
            self.transfer.saw_move(near_bytes, near_s)
        else:
            self.transfer.saw_move(steps.far_loaded_bytes, steps.far_load_s)
            self.transfer.saw_near_move(near_bytes, near_s)
        if steps.num_prefill_tokens:
            share = steps.num_prefill_tokens / steps.num_batched_tokens
            self.transfer.saw_prefill(steps.num_prefill_tokens, steps.duration_s * share)

    def drop_weights_version(self, weights_version: int) -> None:
        """Drop the blocks of old weights."""
        if self.between_nodes is not None:
            self.between_nodes.drop_weights_version(weights_version)
        if self._handle is None:
            return
        try:
            self._handle.drop_weights_version(weights_version)
        except PoolError as error:
            # Keys carry the weights version, so stale blocks are never read; they only take up memory.
            log.warning("the pool keeps the KV of weights version %d: %s", weights_version, error)

    def stats(self) -> PoolStats | None:
        """Counts over all processes; None for a Mooncake store."""
        if self._handle is None:
            return None
        try:
            return self._handle.stats()
        except PoolError as error:
            log.warning("the pool's statistics cannot be read: %s", error)
            return None

    def close(self) -> None:
        """Close the pool, and remove it if it was made for this fleet."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None
        if self._is_ours:
            _remove(self.settings["name"])
        if self._ssd_folder is not None:
            owned_folders.remove_folder(self._ssd_folder)
            self._ssd_folder = None
        if self._owner is not None:
            self._owner.release()
            self._owner = None


def remove_orphaned_pools() -> None:
    """Free the shared memory of drivers that were killed."""
    from seer.kvpool.local_files import find_pools

    for pool in find_pools(DRAM_DIR):
        if pool.name.startswith(f"{PREFIX}-") and not pool.has_owner:
            log.warning("removing pool %s: its driver is gone", pool.name)
            try:
                _remove(pool.name)
            except PoolError as error:  # another process is at it
                log.warning("pool %s is left: %s", pool.name, error)


def _remove(name: str) -> None:
    from seer.kvpool.local_files import PoolFiles, remove_files

    files = PoolFiles.find(name, DRAM_DIR)
    if files is not None:
        remove_files(files)
