# SPDX-License-Identifier: Apache-2.0
"""What a fleet on a Ray cluster has beside its instances: the cluster, the listener, the nodes and the pool."""

from __future__ import annotations

import asyncio

from seer.hosting.ray.cluster import RayCluster
from seer.hosting.ray.launcher import RayLauncher
from seer.hosting.ray.nodes import Nodes
from seer.hosting.ray.pool import NodesPool
from seer.hosting.remote.listener import Listener


class RayHosting:
    """Implements `seer.hosting.hostings.Hosting`."""

    is_local = False

    def __init__(self, address: str, pool: NodesPool | None, *, lease_s: float) -> None:
        self._cluster = RayCluster(address)
        self._pool = pool
        self._lease_s = lease_s
        self._listener: Listener | None = None
        self._nodes: Nodes | None = None
        self._launcher: RayLauncher | None = None

    @property
    def host(self) -> str:
        """The driver's address in the cluster."""
        return self._cluster.host

    @property
    def launcher(self) -> RayLauncher:
        """Starts instances on nodes."""
        assert self._launcher is not None, "the hosting has not started"
        return self._launcher

    async def start(self) -> None:
        """Join the cluster and listen; nodes are prepared as instances are placed on them."""
        await self._cluster.connect()
        self._listener = Listener(self._cluster.host)
        await self._listener.start()
        if self._pool is not None:
            await asyncio.to_thread(self._pool.start, self._cluster.host)
        self._nodes = Nodes(self._cluster, self._pool, lease_s=self._lease_s)
        self._launcher = RayLauncher(self._cluster, self._listener, self._nodes)

    async def tidy(self) -> None:
        """Let the nodes free what ended before now."""
        if self._nodes is not None:
            await self._nodes.tidy()

    async def close(self) -> None:
        """End what `start` began; the instances have been closed."""
        if self._nodes is not None:
            await self._nodes.close()
        if self._pool is not None:
            await asyncio.to_thread(self._pool.stop)
        if self._listener is not None:
            await self._listener.close()
        await self._cluster.close()
