# SPDX-License-Identifier: Apache-2.0
"""The servers of verl's replicas as the fleet of a session (`seer.runs.session_fleet.SessionFleet`).

Ray starts the servers and passes on rare questions. Chunks, tokens and heartbeats go over a connection of our own,
which each server opens to the driver (seer.hosting.remote).

Invariants
  1. All instances that the loop uses hold the newest weights: a server with older ones (it was restarted) is lost to
     the loop until verl's next sync.
  2. A server that takes the place of a lost one has its rank.
  3. The version never goes back: servers that were all restarted have not got the trainer's weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seer.config import HostingConfig
from seer.engine.base import Instance, Weights
from seer.engine.prepare import InstanceSpec
from seer.errors import InstanceError, SeerError
from seer.hosting import ProcessInstance
from seer.hosting.fleet_pool import FleetPool
from seer.hosting.launcher import DialLauncher
from seer.hosting.loop_slot import InstanceListener, LoopSlot
from seer.hosting.messages import BeginRun
from seer.hosting.remote.dial import Dial
from seer.hosting.remote.listener import Listener
from seer.machine.addresses import LOOPBACK
from seer.metrics.events import EventSink
from seer.types import ChunkOutput, DraftMode, InstanceLimits

log = logging.getLogger(__name__)

HOSTING = HostingConfig(silence_deadline_s=60.0, progress_deadline_s=300.0)
"""Compiling a kernel or capturing a graph holds a server's interpreter for long; the first steps on a GPU take minutes
at worst."""
ANSWER_DEADLINE_S = 60.0
"""Of a server to a question about its weights."""
SETTLE_DEADLINE_S = 30.0
"""For the chunks of a loop that broke: the longest step of a large model, several times."""


@dataclass(eq=False, slots=True)
class _Server:
    handle: Any
    """Of the actor."""
    instance: ProcessInstance
    weights_version: int = 0
    """As it answered last."""

    @property
    def is_up(self) -> bool:
        return self.instance.is_up


class ServerFleet:
    """Servers that verl starts, restarts and ends."""

    def __init__(self, address: str) -> None:
        """`address` is this machine's, as other machines know it."""
        self.pool: FleetPool | None = None
        """Set once the first server has said how large its blocks are."""
        self.weights_version = 0
        self.num_lost = 0
        """Servers lost so far."""
        self._address = address
        self._listeners: dict[str, Listener] = {}
        self._newest = 0
        self._servers: dict[int, _Server] = {}
        self._in_loop: set[_Server] = set()
        self._slot = LoopSlot()
        self._heard = asyncio.Event()  # set by every output

    @property
    def instances(self) -> Sequence[Instance]:
        """All of them, by rank."""
        return [self._servers[rank].instance for rank in sorted(self._servers)]

    @property
    def limits(self) -> Sequence[InstanceLimits]:
        """Of each."""
        return [instance.limits for instance in self.instances]

    @property
    def num_up(self) -> int:
        """Servers that are alive, with new or old weights."""
        return sum(server.is_up for server in self._servers.values())

    async def add(self, rank: int, handle: Any, *, is_here: bool) -> None:
        """A server has started, or was restarted, on this machine or another."""
        listener = await self._listen(LOOPBACK if is_here else self._address)

        async def start(_: int, dial: Dial) -> None:
            await handle.seer_serve.remote(dial)

        instance = ProcessInstance(
            rank,
            InstanceSpec(factory="", settings={}),
            options=HOSTING,
            launcher=DialLauncher(listener, start),
            events=self._slot.take_event,
            on_lost=self._lost,
            on_fatal=self._slot.fail,
        )
        before = self._servers.get(rank)
        if before is not None:
            await before.instance.close()
        await instance.start(self._take_output)
        self._servers[rank] = _Server(handle, instance)

    async def needs_change(self) -> bool:
        """Ask every server for its weights: is there a newer version, or a server that the loop does not use?"""
        up = [server for server in self._servers.values() if server.is_up]
        await asyncio.gather(*map(self._ask, up))
        current = [server.weights_version for server in up if server.is_up]
        if not current:
            raise InstanceError("no rollout server is left", hint="the log of verl says why they ended")
        self._newest = max(current)
        if self._newest < self.weights_version:
            raise InstanceError(
                f"the servers hold weights version {self._newest}, the last rollout had {self.weights_version}",
                hint="all were restarted after the last weight sync",
            )
        newest = {server for server in up if server.is_up and server.weights_version == self._newest}
        return self._newest != self.weights_version or not newest <= self._in_loop

    async def use_newest(self) -> None:
        """Go on with the newest weights that `needs_change` has seen; between two loops."""
        self.weights_version = self._newest

    async def settle(self) -> None:
        """Wait for the ends of the chunks of a loop that broke: the next one counts its requests from 0 again.

        A server that runs them for longer has hung: it is lost, and started again after the rollout.
        """
        try:
            async with asyncio.timeout(SETTLE_DEADLINE_S):
                while self._busy():
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            for server in self._busy():
                server.instance.give_up(f"its chunks did not end within {SETTLE_DEADLINE_S:g} s")

    async def update_weights(self, weights: Weights) -> int:
        """verl sends the weights."""
        raise InstanceError("weights change by verl's own sync")

    async def begin_run(self, run: str, drafts: DraftMode, past: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Start drafting anew on every server that takes part."""
        command = BeginRun(run, drafts, self.weights_version, past)
        current = [server for server in self._servers.values() if self._takes_part(server)]
        answers = await asyncio.gather(*(one.instance.configure(command) for one in current), return_exceptions=True)
        for server, answer in zip(current, answers, strict=True):
            if isinstance(answer, BaseException):
                log.warning("rollout server %d could not begin a rollout: %s", server.instance.id, answer)
                server.instance.kill()
                server.weights_version = 0

    def end_group(self, group: int) -> None:
        """Servers forget the tokens of a group."""
        for server in self._servers.values():
            server.instance.end_group(group)

    def attach(
        self,
        loop: InstanceListener,
        *,
        events: EventSink,
        on_output: Callable[[ChunkOutput], None],
        on_failure: Callable[[SeerError], None],
    ) -> None:
        """Serve this loop from now on; raises if no server can."""
        self._in_loop = {server for server in self._servers.values() if self._takes_part(server)}
        if not self._in_loop:
            raise InstanceError("no rollout server is left that could begin the rollout", hint="the log says why")
        self._slot.attach(loop, events, on_output, on_failure)
        for server in self._servers.values():
            if server not in self._in_loop:
                log.warning("rollout server %d waits for weights: the others do its work", server.instance.id)
                loop.lose_instance(server.instance.id)

    def detach(self) -> None:
        """The loop has ended; drop outputs until the next one."""
        self._slot.detach()

    async def close(self) -> None:
        """Hang up; the servers are verl's."""
        await asyncio.gather(*(server.instance.close() for server in self._servers.values()))
        await asyncio.gather(*(listener.close() for listener in self._listeners.values()))

    async def _listen(self, host: str) -> Listener:
        if host not in self._listeners:
            listener = Listener(host)
            await listener.start()
            self._listeners[host] = listener
        return self._listeners[host]

    async def _ask(self, server: _Server) -> None:
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                server.weights_version = await server.handle.seer_weights_version.remote()
        except Exception as error:  # its death, above all
            log.warning("rollout server %d does not answer: %s", server.instance.id, error)
            server.instance.kill()
            server.weights_version = 0

    def _take_output(self, output: ChunkOutput) -> None:
        self._heard.set()
        self._slot.take_output(output)

    def _busy(self) -> list[_Server]:
        return [one for one in self._servers.values() if one.is_up and one.instance.num_in_flight]

    def _takes_part(self, server: _Server) -> bool:
        return server.is_up and server.weights_version == self.weights_version

    def _lost(self, rank: int, reason: str) -> None:
        self.num_lost += 1
        log.warning("rollout server %d was lost: %s", rank, reason)
        self._slot.lose(rank)
        if not any(self._takes_part(server) for server in self._servers.values()):
            self._slot.fail(InstanceError(f"no rollout server is left; the last one was lost: {reason}"))
