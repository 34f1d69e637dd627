# SPDX-License-Identifier: Apache-2.0
"""The Mooncake store of a training: its master beside the driver, a part on every machine that has a rollout server.

The parts are started by the agents of `seer.hosting.ray`, one actor per machine, when the first server there asks.
"""

from __future__ import annotations

import asyncio
from typing import Any

from seer.config import HostingConfig
from seer.hosting.ray.cluster import AUTO, RayCluster
from seer.hosting.ray.nodes import Nodes
from seer.hosting.ray.pool import NodesPool


class MachineStores:
    """The master and the parts, from `start` to `close`."""

    def __init__(self, pool: NodesPool) -> None:
        self._pool = pool
        self._cluster = RayCluster(AUTO)  # the driver is an actor of it
        self._nodes: Nodes | None = None

    async def start(self) -> None:
        """Start the master on this machine."""
        await self._cluster.connect()
        await asyncio.to_thread(self._pool.start, self._cluster.host)
        self._nodes = Nodes(self._cluster, self._pool, lease_s=HostingConfig().lease_deadline_s)

    async def way_in(self, node: str) -> dict[str, Any]:
        """Settings of the pool for a server on this node, whose part is started if it is not there."""
        assert self._nodes is not None, "the store has not started"
        return (await self._nodes.get(node)).way_into_pool

    async def close(self) -> None:
        """End the parts and the master."""
        if self._nodes is not None:
            await self._nodes.close()
            self._nodes = None
        await asyncio.to_thread(self._pool.stop)
