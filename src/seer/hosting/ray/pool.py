# SPDX-License-Identifier: Apache-2.0
"""The KV pool between nodes: a Mooncake store whose master runs beside the driver, with memory of every node in use.

An instance attaches to the part on its own node through shared memory; KV that another node holds comes from there over
the network. KV of a node that is lost is computed again.
"""

from __future__ import annotations

from seer.kvpool.mooncake_keeper import MooncakeKeeper
from seer.kvpool.mooncake_servers import MooncakeServersConfig


class NodesPool:
    """The master, and how much memory each node gives."""

    def __init__(self, node_bytes: int) -> None:
        self.node_bytes = node_bytes
        self._keeper: MooncakeKeeper | None = None

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

    def start(self, host: str) -> None:
        """Start the master on this machine's address."""
        self._keeper = MooncakeKeeper(MooncakeServersConfig(dram_bytes=0, host=host))

    def stop(self) -> None:
        """End the master; the nodes' agents have ended their parts."""
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper = None
