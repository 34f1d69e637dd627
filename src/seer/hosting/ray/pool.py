# SPDX-License-Identifier: Apache-2.0
"""The KV pool between nodes: a Mooncake store whose master runs beside the driver, with memory of every node in use.

Each node has a near tier too, a local pool that its instances share (seer.kvpool.node_pool). An instance reads from
there what its node holds; KV that only another node holds comes from there over the network. KV of a node that is lost
is computed again.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from seer.kvpool.mooncake_keeper import MooncakeKeeper
from seer.kvpool.mooncake_servers import MooncakeProtocol, MooncakeServersConfig


class Unneeded(NamedTuple):
    """What the near tiers need not hold any longer."""

    requests: list[int]
    weights_versions: list[int]


class NodesPool:
    """The master, how much memory each node gives, and what has ended since the nodes last heard of it."""

    def __init__(self, node_bytes: int, *, block_bytes: int, protocol: MooncakeProtocol = "auto") -> None:
        self.node_bytes = node_bytes
        self.block_bytes = block_bytes
        self.protocol = protocol
        self._keeper: MooncakeKeeper | None = None
        self._unneeded = Unneeded([], [])
        self._starting = threading.Lock()
        self._is_over = False

    @property
    def master_address(self) -> str:
        """Where the master listens."""
        assert self._keeper is not None, "the pool has not started"
        return self._keeper.servers.master_address

    @property
    def metrics_address(self) -> str:
        """Where the master says what the store holds."""
        assert self._keeper is not None, "the pool has not started"
        return self._keeper.servers.metrics_address

    def free(self, request: int) -> None:
        """The request has ended, wherever it ran."""
        self._unneeded.requests.append(request)

    def drop_weights_version(self, weights_version: int) -> None:
        """No KV of this version is read any more."""
        self._unneeded.weights_versions.append(weights_version)

    def take_unneeded(self) -> Unneeded:
        """For the nodes: what has ended since the last call."""
        taken, self._unneeded = self._unneeded, Unneeded([], [])
        return taken

    def start(self, host: str) -> None:
        """Start the master on this machine's address; nothing happens after `stop`."""
        with self._starting:
            if not self._is_over:
                self._keeper = MooncakeKeeper(MooncakeServersConfig(dram_bytes=0, host=host))

    def stop(self) -> None:
        """End the master; the nodes' agents have ended their parts. Waits for a `start` in another thread."""
        with self._starting:
            self._is_over = True
            if self._keeper is not None:
                self._keeper.stop()
                self._keeper = None
