# SPDX-License-Identifier: Apache-2.0
"""Where the processes of a fleet run: on this machine, or on the nodes of a Ray cluster."""

from __future__ import annotations

from typing import Protocol

from seer.config import RolloutConfig
from seer.hosting.fleet_pool import FleetPool
from seer.hosting.launcher import Launcher, LocalLauncher
from seer.machine.addresses import LOOPBACK


class Hosting(Protocol):
    """What a fleet asks of the place it runs in."""

    @property
    def is_local(self) -> bool:
        """Whether instances share this machine's memory and files."""

    @property
    def host(self) -> str:
        """The driver's address, as the instances know it."""

    @property
    def launcher(self) -> Launcher:
        """Starts the processes of instances."""

    async def start(self) -> None:
        """Get ready to launch."""

    async def tidy(self) -> None:
        """Have freed what requests that ended held, before a run begins whose requests have the same ids."""

    async def close(self) -> None:
        """End what `start` began; the instances have been closed."""


class LocalHosting:
    """This machine."""

    is_local = True
    host = LOOPBACK

    def __init__(self) -> None:
        self.launcher = LocalLauncher()

    async def start(self) -> None:
        """Nothing to get ready."""

    async def tidy(self) -> None:
        """The pool of this machine is freed at once."""

    async def close(self) -> None:
        """Nothing to end."""


def make_hosting(config: RolloutConfig, pool: FleetPool | None) -> Hosting:
    """The hosting that the configuration asks for; nothing is started."""
    if config.hosting.ray is None:
        return LocalHosting()
    from seer.hosting.ray.hosting import RayHosting

    between = pool.between_nodes if pool is not None else None
    return RayHosting(config.hosting.ray, between, lease_s=config.hosting.lease_deadline_s)
