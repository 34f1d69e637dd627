# SPDX-License-Identifier: Apache-2.0
"""The nodes that a fleet uses, as its driver holds them: one agent each, made when the first instance comes there.

Invariants
  1. Weights go to a node once, however many of its instances ask for them, and to the driver's own machine never.
  2. Only the weights that were asked for last are on their way to a node: those before are ended first, and
     calls that wait for them fail. A path is given out when its file is whole.
  3. A node that was forgotten, as one whose agent has died, gets a new agent when it is next needed. Instances there
     live on: what they compute stays right. Of the pool they have only what they hold until they are restarted.
  4. A preparation is given up only by those who know of that one, not by those who asked an agent before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from seer.engine.instance_settings import InstanceSettings
from seer.engine.prepare import InstanceSpec
from seer.errors import InstanceError
from seer.hosting.messages import Command, UpdateWeights
from seer.hosting.ray.cluster import RayCluster
from seer.hosting.ray.host_actor import plain_error, sentence_of
from seer.hosting.ray.node_agent import FileMark, NodeAgent
from seer.hosting.ray.pool import NodesPool, Unneeded
from seer.machine.given_files import open_given

log = logging.getLogger(__name__)

PART_BYTES = 32 << 20
"""Of weights, in one call: what a node needs for them beside their own size."""
RENEWALS_PER_LEASE = 4
"""A few may be late."""
TIDY_S = 1.0
"""Between two calls of every agent: their near tiers keep KV for this much longer than it is needed."""
TIDY_DEADLINE_S = 5.0
"""For the answers before a run begins."""
_CLOSE_DEADLINE_S = 10.0
"""A node that does not answer is left to Ray, which ends the actors of a driver that is gone."""


def needs_files(command: Command) -> TypeGuard[UpdateWeights]:
    """Whether a command names a file that only the driver's machine has."""
    return isinstance(command, UpdateWeights) and command.is_staged


class Node:
    """One node and its agent."""

    def __init__(self, id: str, address: str, agent: Any) -> None:
        self.id = id
        self.address = address
        self.agent = agent
        self.way_into_pool: dict[str, Any] = {}
        """Settings of the pool that are this node's own."""
        self._bringing: tuple[str, asyncio.Task[str]] | None = None
        """Of the weights that were asked for last: the driver's path, and the node's once they are there."""

    async def start_store(self, pool: NodesPool) -> None:
        """Start the node's part of the pool."""
        self.way_into_pool = await self.agent.start_store.remote(
            self.address, pool.master_address, pool.node_bytes, pool.block_bytes, pool.protocol
        )

    def fitted(self, spec: InstanceSpec) -> InstanceSpec:
        """What an instance on this node must make: with the node's own way into the pool."""
        settings = spec.settings
        if not isinstance(settings, InstanceSettings) or settings.pool is None:
            return spec
        return replace(spec, settings=replace(settings, pool={**settings.pool, **self.way_into_pool}))

    async def localized(self, command: Command) -> Command:
        """A command that names a file which the driver staged, with the node's own copy of it."""
        if not needs_files(command):
            return command
        bringing = self._brought(command.path)
        await asyncio.wait({bringing})  # not awaited itself: others wait for it too
        what = f"weights cannot be brought to node {self.address}"
        if bringing.cancelled():
            raise InstanceError(f"{what}: others have been asked for since, or the node was given up")
        error = bringing.exception()
        if error is not None:
            if self._bringing == (command.path, bringing):
                self._bringing = None  # the next one tries again
            assert isinstance(error, Exception), f"a task does not end by {error!r}"
            raise plain_error(error, what) from None
        return msgspec.structs.replace(command, path=bringing.result())

    def _brought(self, path: str) -> asyncio.Task[str]:
        """Weights that are there, or on their way."""
        if self._bringing is not None and self._bringing[0] == path:
            return self._bringing[1]
        if self._bringing is not None:
            self._bringing[1].cancel()  # it calls the agent no more
        task = asyncio.create_task(self._bring(Path(path)))
        self._bringing = (path, task)
        return task

    async def _bring(self, path: Path) -> str:
        mark = FileMark.of(path)
        if await self.agent.sees.remote(mark):
            return str(path)
        there = str(await self.agent.begin_weights.remote(path.name, mark.num_bytes))
        with open_given(path) as file:
            offset = 0
            while part := await asyncio.to_thread(file.read, PART_BYTES):
                await self.agent.add_weights.remote(there, offset, part)
                offset += len(part)
        await self.agent.end_weights.remote(there)
        return there

    async def close(self) -> None:
        """Bring nothing more here."""
        if self._bringing is not None:
            self._bringing[1].cancel()
            await asyncio.wait({self._bringing[1]})


class Nodes:
    """The nodes in use, by Ray's id."""

    def __init__(self, cluster: RayCluster, pool: NodesPool | None, *, lease_s: float) -> None:
        """`lease_s` is how long an agent waits for a driver that it does not hear."""
        self._cluster = cluster
        self._pool = pool
        self._lease_s = lease_s
        self._nodes: dict[str, asyncio.Task[Node]] = {}
        self._ending: set[asyncio.Task[None]] = set()  # agents of nodes that were forgotten
        self._renewing: set[asyncio.Task[None]] = set()
        self._tasks = [asyncio.create_task(self._renew())]
        if pool is not None:
            self._tasks.append(asyncio.create_task(self._tidy(pool)))

    async def get(self, id: str) -> Node:
        """The node, with its agent and its part of the pool running."""
        known = self._nodes.get(id)
        if known is not None and not await self._answers(known):
            self._forget_this(id, known)
        if id not in self._nodes:
            self._nodes[id] = asyncio.create_task(self._prepare(id))
        preparing = self._nodes[id]
        await asyncio.wait({preparing})  # not awaited itself: others wait for it too
        if preparing.cancelled():
            raise InstanceError(f"node {id} was given up while it was prepared")
        error = preparing.exception()
        if error is not None:
            self._forget_this(id, preparing)
            raise error
        return preparing.result()

    async def localized(self, id: str, command: Command) -> Command:
        """A command as the node must see it; a node whose agent has died gets a new one for it."""
        if not needs_files(command):
            return command
        known = self._nodes.get(id)
        if known is not None and _is_ready(known):
            try:
                return await known.result().localized(command)  # at once: those asked for last must come last
            except InstanceError:
                if await self._answers(known):
                    raise
        try:
            node = await self.get(id)
        except Exception as error:
            raise plain_error(error, f"node {id} cannot be prepared") from None
        return await node.localized(command)

    async def _answers(self, preparing: asyncio.Task[Node]) -> bool:
        """Whether the agent of a node that was prepared still lives; True while it is being prepared."""
        if not preparing.done():
            return True
        try:
            await preparing.result().agent.renew.remote()
        except Exception:  # Ray has a class for each way in which it can have ended
            return False
        return True

    def _forget_this(self, id: str, preparing: asyncio.Task[Node]) -> None:
        """Forget a node, unless it was prepared anew since."""
        if self._nodes.get(id) is preparing:
            self.forget(id)

    def forget(self, id: str) -> None:
        """A node is out of reach, or could not be prepared: begin anew when it is next used."""
        gone = self._nodes.pop(id, None)
        if gone is None:
            return
        if not gone.done():
            gone.cancel()
        elif not gone.cancelled() and gone.exception() is None:
            ending = asyncio.create_task(self._close(gone.result()))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End every agent, with what it holds."""
        for running in (*self._tasks, *self._renewing):
            running.cancel()
        tasks, self._nodes = list(self._nodes.values()), {}
        for task in tasks:
            task.cancel()  # of one that is being prepared; nothing happens to the others
        found = await asyncio.gather(*tasks, return_exceptions=True)
        nodes = [node for node in found if isinstance(node, Node)]
        await asyncio.gather(*map(self._close, nodes), *self._ending)

    async def _close(self, node: Node) -> None:
        """Have an agent free what it holds, if it can be reached, and end it."""
        await node.close()
        with contextlib.suppress(Exception):  # it has ended
            await _within(_CLOSE_DEADLINE_S, node.agent.close.remote())
        self._end(node)

    async def _renew(self) -> None:
        """Let the agents hear from their driver, and forget those that are dead."""
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            for id, preparing in self._ready():
                renewing = asyncio.create_task(self._renew_one(id, preparing))  # one that is slow delays no other
                self._renewing.add(renewing)
                renewing.add_done_callback(self._renewing.discard)

    async def _renew_one(self, id: str, preparing: asyncio.Task[Node]) -> None:
        try:
            async with asyncio.timeout(self._lease_s):
                await preparing.result().agent.renew.remote()
        except Exception as error:  # one that is out of reach may answer again
            if isinstance(error, self._cluster.ray.exceptions.ActorDiedError):
                log.warning("the agent of node %s died: %s", preparing.result().address, sentence_of(error))
                self._forget_this(id, preparing)

    async def _tidy(self, pool: NodesPool) -> None:
        """Let the near tiers free what is not needed any longer."""
        while True:
            await asyncio.sleep(TIDY_S)
            unneeded = pool.take_unneeded()
            if any(unneeded):
                self._tidy_all(unneeded)

    async def tidy(self) -> None:
        """Have the near tiers free what has ended until now: requests that come next have the same ids.

        One that does not answer may later drop KV that is needed, which is computed again.
        """
        if self._pool is not None:
            calls = self._tidy_all(self._pool.take_unneeded())  # empty ones too: those before may not have arrived
            await asyncio.gather(*(_within(TIDY_DEADLINE_S, call) for call in calls))

    def _tidy_all(self, unneeded: Unneeded) -> list[Any]:
        calls = []
        for _, preparing in self._ready():
            with contextlib.suppress(Exception):  # the agent has ended
                calls.append(preparing.result().agent.tidy.remote(*unneeded))
        return calls

    def _ready(self) -> list[tuple[str, asyncio.Task[Node]]]:
        """Nodes whose preparation has succeeded."""
        return [(id, task) for id, task in self._nodes.items() if _is_ready(task)]

    async def _prepare(self, id: str) -> Node:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        known = (await asyncio.to_thread(self._cluster.nodes)).get(id)
        address = str(known["NodeManagerAddress"]) if known is not None else self._cluster.host
        options = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(id, soft=False)}
        agent = self._cluster.ray.remote(**options)(NodeAgent).remote(self._lease_s)
        node = Node(id, address, agent)
        try:
            await agent.renew.remote()
            if self._pool is not None:
                await node.start_store(self._pool)
        except BaseException:
            self._end(node)
            raise
        return node

    def _end(self, node: Node) -> None:
        if self._cluster.is_joined:
            with contextlib.suppress(Exception):  # it has ended, or cannot be reached
                self._cluster.ray.kill(node.agent)


def _is_ready(preparing: asyncio.Task[Node]) -> bool:
    return preparing.done() and not preparing.cancelled() and preparing.exception() is None


async def _within(deadline_s: float, answer: Awaitable[Any]) -> None:
    with contextlib.suppress(Exception):  # a node that is gone needs nothing freed
        async with asyncio.timeout(deadline_s):
            await answer
