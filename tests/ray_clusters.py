# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine for tests, and instances on it. Only its own processes are ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seer.config import HostingConfig
from seer.engine.base import OutputSink
from seer.engine.instance_wrapper import InstanceWrapper
from seer.engine.prepare import InstanceSpec
from seer.hosting import ProcessInstance
from seer.hosting.devices import InstanceDevices, InstanceNeeds
from seer.hosting.launcher import Child
from seer.hosting.ray.hosting import RayHosting

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

SETTLED_S = 120.0
ON_ONE_CORE = InstanceDevices(needs=InstanceNeeds(single_thread=True))


class TwoNodes:
    """The cluster."""

    def __init__(self, cluster: Any, second: Any) -> None:
        self.cluster, self.second = cluster, second

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def replace_second(self) -> None:
        """Lose the second node, processes and all, and let another join."""
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = self.cluster.add_node(num_cpus=1)

    async def settle(self) -> None:
        """Wait until Ray counts two nodes: one that was killed counts as alive until its health check fails."""
        await asyncio.to_thread(self.cluster.wait_for_nodes, SETTLED_S)


@contextlib.contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """One CPU on each node, so two instances are never on one."""
    ray: Any = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # instances of tests are made there
        cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        try:
            second = cluster.add_node(num_cpus=1)
            ray.init(address=cluster.address, log_to_driver=False)
            yield TwoNodes(cluster, second)
        finally:
            ray.shutdown()
            cluster.shutdown()


class OnRay(InstanceWrapper[ProcessInstance]):
    """An instance on a node, with a hosting of its own."""

    def __init__(self, address: str, spec: InstanceSpec, options: HostingConfig, **settings: Any) -> None:
        self.hosting = RayHosting(address, None, lease_s=60.0)
        super().__init__(ProcessInstance(0, spec, options=options, devices=ON_ONE_CORE, launcher=self, **settings))

    async def launch(self, *arguments: Any) -> Child:
        return await self.hosting.launcher.launch(*arguments)

    async def start(self, sink: OutputSink) -> None:
        await self.hosting.start()
        try:
            await self.inner.start(sink)
        except BaseException:
            await self.hosting.close()
            raise

    async def close(self) -> None:
        await self.inner.close()
        await self.hosting.close()
