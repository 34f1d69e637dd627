# SPDX-License-Identifier: Apache-2.0
"""An `InstanceHost` as the driver holds it: the actor in its place, and what it says of its process.

Ray has a class for every way in which an actor or a node can fail; here they become one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from seer.errors import InstanceError, SeerError
from seer.hosting.ray.cluster import RayCluster
from seer.hosting.ray.instance_host import InstanceHost
from seer.hosting.ray.placement import Place, Placer
from seer.hosting.remote.dial import Dial


class HostActor:
    """One actor and the place it holds, until `release`."""

    def __init__(self, cluster: RayCluster, placer: Placer, place: Place, name: str, bundle: dict[str, float]) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._cluster = cluster
        self._placer = placer
        self.place = place
        options = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "max_restarts": 0,  # the supervisor restarts, with the configuration that an instance must have
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place.group, 0),
        }
        self._actor: Any = cluster.ray.remote(**options)(InstanceHost).remote(name)
        self._ended: asyncio.Task[str] | None = None

    async def start(self, dial: Dial, factory_module: str, single_thread: bool) -> int:
        """Have the process started; returns its process id."""
        pid = int(await self._actor.start.remote(dial, factory_module, single_thread))
        self._ended = asyncio.create_task(self._cause_of_end())
        return pid

    @property
    def ended(self) -> asyncio.Task[str]:
        """How the process ended, once it has, or its actor or node."""
        assert self._ended is not None, "nothing was started"
        return self._ended

    async def read_log(self, offset: int) -> tuple[int, bytes]:
        """What the process wrote after an offset."""
        end, part = await self._actor.read_log.remote(offset)
        return int(end), bytes(part)

    async def free_port(self) -> int:
        """A port of its node that nothing listens on."""
        return int(await self._actor.free_port.remote())

    async def waited_s(self) -> float:
        """For how long the process waited for a core since the last call."""
        return float(await self._actor.waited_s.remote())

    def kill(self) -> None:
        """Have the process killed; never waits."""
        if self._cluster.is_joined:
            with contextlib.suppress(Exception):  # the actor has ended, and its process with it
                self._actor.kill.remote()

    async def release(self) -> None:
        """End the actor, with its process, and give its place back."""
        if self._ended is not None:
            self._ended.cancel()
        await asyncio.to_thread(self._end)
        await asyncio.to_thread(self._placer.give_back, self.place.group)

    def _end(self) -> None:
        if self._cluster.is_joined:
            with contextlib.suppress(Exception):  # it has ended, or cannot be reached
                self._cluster.ray.kill(self._actor)

    async def _cause_of_end(self) -> str:
        try:
            return str(await self._actor.wait.remote())
        except Exception as error:
            return f"its actor ended: {sentence_of(error)}"


def plain_error(error: Exception, what: str) -> SeerError:
    """One of our errors for whatever a call of Ray raised."""
    cause = getattr(error, "cause", None)  # of an error that an actor raised
    if isinstance(cause, SeerError):
        return cause
    return error if isinstance(error, SeerError) else InstanceError(f"{what}: {sentence_of(error)}")


def sentence_of(error: Exception) -> str:
    """The first line of an error of Ray, which may have a page."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
