# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of instances on the nodes of a Ray cluster.

Waits for                                    unblocked by
  a place, the node's agent                    Ray, start_deadline_s
  the process that dials in                    it, its death as its actor reports it, start_deadline_s
  its exit                                     its actor, the actor's death, the caller's deadline
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from seer.config import HostingConfig
from seer.engine.prepare import InstanceSpec
from seer.errors import DeadlineExceeded, InstanceError
from seer.hosting.devices import InstanceDevices
from seer.hosting.launcher import Child
from seer.hosting.messages import Command
from seer.hosting.ray.cluster import RayCluster
from seer.hosting.ray.host_actor import HostActor, plain_error
from seer.hosting.ray.log_copy import LogCopy
from seer.hosting.ray.nodes import Node, Nodes
from seer.hosting.ray.placement import Place, Placer
from seer.hosting.remote.listener import Connection, Listener, abandon

ASK_AFTER_S = 1.0
"""Of silence. Asking is a call of Ray: too much with every heartbeat of a thousand instances."""
LOG_DEADLINE_S = 5.0
"""For the last lines of a log, from a node that may be gone."""


class RayLauncher:
    """Places an instance, has its process started there, and waits until it dials in."""

    def __init__(self, cluster: RayCluster, listener: Listener, nodes: Nodes) -> None:
        self._cluster = cluster
        self._listener = listener
        self._nodes = nodes
        self._placer = Placer(cluster)

    async def launch(self, id: int, spec: InstanceSpec, devices: InstanceDevices, options: HostingConfig) -> Child:
        """A process on whatever node has a place."""
        name, bundle = f"instance-{id}", devices.needs.bundle()
        place = await self._place(name, bundle, options.start_deadline_s)
        actor = log = None
        try:
            actor = HostActor(self._cluster, self._placer, place, name, bundle)
            log = LogCopy(name, options.log_dir, actor.read_log)  # nothing is started if it cannot be written
            async with asyncio.timeout(options.start_deadline_s):
                node = await self._nodes.get(place.node)
                fitted = node.fitted(spec)
                connection, pid = await self._start(name, actor, fitted, devices.needs.single_thread)
        except BaseException as error:
            if log is not None:
                await log.finish(0.0)
            if actor is not None:
                await actor.release()
            else:
                await asyncio.to_thread(self._placer.give_back, place.group)
            if isinstance(error, TimeoutError):
                self._suspect(place.node)
                raise DeadlineExceeded(f"the start of a process for {name}", options.start_deadline_s) from None
            if isinstance(error, Exception):
                raise plain_error(error, f"{name} cannot be started on its node") from None
            raise
        suspect = functools.partial(self._suspect, node.id)
        return RayChild(actor, node, self._nodes, connection, fitted, pid=pid, log=log, suspect=suspect)

    async def _place(self, name: str, bundle: dict[str, float], deadline_s: float) -> Place:
        try:
            return await self._placer.place(name, bundle, deadline_s)
        except Exception as error:  # of a cluster that does not answer: a start that failed, which is tried again
            raise plain_error(error, f"no place can be had for {name}") from None

    async def _start(
        self, name: str, actor: HostActor, spec: InstanceSpec, single_thread: bool
    ) -> tuple[Connection, int]:
        dial, come = self._listener.expect()
        try:
            pid = await actor.start(dial, spec.factory.partition(":")[0], single_thread)
            waits: set[asyncio.Future[object]] = {come, actor.ended}  # type: ignore[arg-type]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not come.done():
                raise InstanceError(f"{name} died while starting: {actor.ended.result()}")
            return come.result(), pid
        except BaseException:
            abandon(come)
            raise

    def _suspect(self, node: str) -> None:
        self._placer.suspect(node)
        self._nodes.forget(node)


class RayChild:
    """A process on a node, and the actor that started it."""

    def __init__(
        self,
        actor: HostActor,
        node: Node,
        nodes: Nodes,
        connection: Connection,
        spec: InstanceSpec,
        *,
        pid: int,
        log: LogCopy,
        suspect: Callable[[], None],
    ) -> None:
        """`suspect` is called when the node is out of reach."""
        self._actor = actor
        self._node = node
        self._nodes = nodes
        self.channel, self.clock = connection.channel, connection.clock
        self.spec = spec
        self.pid: int | None = pid
        self._log = log
        self._suspect = suspect
        self._asking: asyncio.Task[float] | None = None

    @property
    def node(self) -> str | None:
        """The address of its node."""
        return self._node.address

    @property
    def node_name(self) -> str | None:
        """Its node's id: two nodes may have one address."""
        return self._node.id

    async def free_port(self) -> int:
        """Asked of its actor, which is on its node."""
        try:
            return await self._actor.free_port()
        except Exception as error:
            raise plain_error(error, f"no port can be had of node {self.node}") from None

    async def localized(self, command: Command) -> Command:
        """Weights that only the driver's machine has are first brought to the node, once for all its instances."""
        return await self._nodes.localized(self._node.id, command)  # its agent may be another one by now

    def look_after(self, silent_s: float) -> float:
        """Copy its log. If it is silent, ask its node how long it waited for a core; returns the last answer."""
        self._log.copy_soon()
        if silent_s < ASK_AFTER_S or (self._asking is not None and not self._asking.done()):
            return 0.0  # a node that is too busy to answer is asked once
        asked, self._asking = self._asking, asyncio.create_task(self._actor.waited_s())
        return asked.result() if asked is not None and asked.exception() is None else 0.0

    def kill(self) -> None:
        """Have its actor kill it."""
        self._actor.kill()

    async def wait(self, deadline_s: float) -> None:
        """Wait for the news of its end; without any the node is out of reach, and its lease will end it."""
        await asyncio.wait({self._actor.ended}, timeout=deadline_s)
        if not self._actor.ended.done():
            self._actor.kill()
            self._suspect()

    async def exit_cause(self) -> str:
        """As its actor saw it."""
        if not self._actor.ended.done():
            return f"node {self.node} cannot be reached"
        return f"{self._actor.ended.result()} (node {self.node})"

    async def close(self) -> None:
        """End its actor and give its place back."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self._log.finish(LOG_DEADLINE_S if self._actor.ended.done() else 0.0)
        await self._actor.release()
