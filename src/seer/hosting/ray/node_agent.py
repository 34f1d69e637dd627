# SPDX-License-Identifier: Apache-2.0
"""The actor of a fleet on one node: what its instances there share.

  weights   files that the driver streams here once, into this node's shared memory
  pool      the node's part of a Mooncake store, started and watched, and its near tier in shared memory

Invariants
  1. At most the newest weights are held; `close` removes them and the near tier, and a process of its own does if this
     one is killed (janitor.py).
  2. A file of weights has parts of one file of the driver alone: each has a path of its own, and parts for another one
     are refused.
  3. The store ends with this actor, however that ends.
  4. An agent that does not hear its driver for the time of its lease frees everything and ends: on a node that is cut
     off, Ray does so only later, and without freeing shared memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from seer.engine.free_memory import free_memory_bytes
from seer.engine.staged_weights import make_shared_folder, remove_shared_folder
from seer.errors import InstanceError
from seer.hosting.launch import ChildProcess
from seer.hosting.lease import Lease
from seer.hosting.ray.near_tier import NearTier

if TYPE_CHECKING:
    from seer.kvpool.mooncake_servers import MooncakeProtocol

FREE_SHARE = 0.5
"""Of the node's free memory, for its part of the pool at most."""
NEAR_SHARE = 0.5
"""Of that, for the near tier. Both hold what the node saved last; the near one also what it read from others."""
_JANITOR_DEADLINE_S = 10.0
"""It ends at once; only a busy node is slow."""


class FileMark(NamedTuple):
    """Tells one file from another: as the driver sees it, and as this node does."""

    path: str
    device: int
    inode: int
    num_bytes: int

    @classmethod
    def of(cls, path: Path) -> FileMark:
        """The mark of a file of this machine."""
        found = path.stat()
        return cls(str(path), found.st_dev, found.st_ino, found.st_size)


class NodeAgent:
    """Methods are called by the driver through Ray, one after the other."""

    def __init__(self, lease_s: float) -> None:
        self._lease = Lease(lease_s, self._abandon)
        self._lease.start()
        self._home: Path | None = None
        self._weights: Path | None = None
        self._weights_bytes = 0
        self._janitor: ChildProcess | None = None
        self._store: Any = None
        self._near = NearTier()

    def sees(self, mark: FileMark) -> bool:
        """Whether this node opens the very same file under this path: it is the driver's own machine."""
        try:
            return FileMark.of(Path(mark.path)) == mark
        except OSError:
            return False

    def begin_weights(self, name: str, num_bytes: int) -> str:
        """Make room for a file; returns its path, which no other had. An earlier one is dropped: processes that have
        opened it keep it.
        """
        self._drop_weights()
        self._start_janitor()
        self._home = make_shared_folder("seer-weights", num_bytes)
        self._weights, self._weights_bytes = self._home / name, num_bytes
        return str(self._weights)

    def add_weights(self, path: str, offset: int, part: bytes) -> None:
        """Write a part of the file that `begin_weights` named."""
        self._lease.renew()
        with open(self._begun(path), "r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(part)

    def end_weights(self, path: str) -> None:
        """Raise unless the file is whole."""
        found = self._begun(path).stat().st_size
        if found != self._weights_bytes:
            raise InstanceError(
                f"weights at {path} have {found} bytes, {self._weights_bytes} were to come",
                hint="the driver's copy was removed while it was sent",
            )

    def _begun(self, path: str) -> Path:
        if self._weights is None or str(self._weights) != path:
            raise InstanceError(
                f"parts of weights came for {path}, this node now takes {self._weights}",
                hint="newer weights have been sent since",
            )
        return self._weights

    def start_store(
        self, host: str, master_address: str, dram_bytes: int, block_bytes: int, protocol: MooncakeProtocol
    ) -> dict[str, Any]:
        """Start this node's part of the pool if it does not run; returns how its instances open it."""
        from seer.kvpool.mooncake_keeper import MooncakeKeeper
        from seer.kvpool.mooncake_servers import MooncakeServersConfig

        if self._store is None:
            fitting = min(dram_bytes, int(FREE_SHARE * free_memory_bytes()))
            self._start_janitor()
            fitting -= self._near.start(int(NEAR_SHARE * fitting), block_bytes)
            config = MooncakeServersConfig(
                dram_bytes=fitting, host=host, master_address=master_address, protocol=protocol
            )
            self._store = MooncakeKeeper(config)
        return {"owner_address": str(self._store.servers.owner_address)} | self._near.settings()

    def tidy(self, requests: Sequence[int], weights_versions: Sequence[int]) -> None:
        """Free the near tier's KV of requests that ended and of old weights."""
        self._near.tidy(requests, weights_versions)

    def renew(self) -> int:
        """The driver is there; returns the process id of this actor."""
        self._lease.renew()
        return os.getpid()

    def _abandon(self) -> None:
        """In the lease's thread: the driver is silent."""
        try:
            self.close()
        finally:  # also where a store does not end: it ends with this process
            os._exit(1)

    def close(self) -> None:
        """Free everything on this node."""
        self._lease.end()
        self._drop_weights()
        self._near.close()
        if self._store is not None:
            self._store.stop()
            self._store = None
        if self._janitor is not None:
            self._janitor.socket.close()
            asyncio.run(self._janitor.wait(_JANITOR_DEADLINE_S))
            self._janitor.close()
            self._janitor = None

    def _start_janitor(self) -> None:
        if self._janitor is None:
            self._janitor = ChildProcess("janitor", None, module="seer.hosting.ray.janitor", single_thread=True)

    def _drop_weights(self) -> None:
        if self._home is not None:
            remove_shared_folder(self._home)
        self._home = self._weights = None
