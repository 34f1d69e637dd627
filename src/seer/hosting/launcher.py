# SPDX-License-Identifier: Apache-2.0
"""How the process of an instance is started, watched from outside and ended: what differs between hostings.

`ProcessInstance` speaks to every process in the same way, over the channel of its `Child`. A launcher makes the child:

    LocalLauncher    a process of this machine, with a socket pair (launch.py)
    DialLauncher     a process anywhere that dials in; the caller has it started
    RayLauncher      a process on a node of a Ray cluster, which dials in (ray/launcher.py)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from seer.config import HostingConfig
from seer.engine.prepare import InstanceSpec
from seer.errors import DeadlineExceeded, InstanceError
from seer.hosting.channel import Channel
from seer.hosting.devices import InstanceDevices
from seer.hosting.launch import ChildProcess
from seer.hosting.messages import Command, Up
from seer.hosting.remote.clock import ClockOffset
from seer.hosting.remote.dial import Dial
from seer.hosting.remote.listener import Connection, Listener, abandon
from seer.hosting.starvation import Starvation
from seer.machine.addresses import EVERY_ADDRESS, free_ports

_decoder: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


class Child(Protocol):
    """A started process, as the driver holds it."""

    @property
    def channel(self) -> Channel[Up]:
        """The connection to it."""

    @property
    def pid(self) -> int | None:
        """Its process id on its machine, where that is known."""

    @property
    def node(self) -> str | None:
        """The address of its machine; None for the driver's own."""

    @property
    def node_name(self) -> str | None:
        """Tells machines apart: processes with equal names share memory. None for the driver's own."""

    @property
    def clock(self) -> ClockOffset:
        """How its machine's clock differs from the driver's."""

    @property
    def spec(self) -> InstanceSpec:
        """What it must make, as its machine must see it."""

    async def free_port(self) -> int:
        """A port of its machine that nothing listens on."""

    async def localized(self, command: Command) -> Command:
        """A command as its machine must see it: files it names are there."""

    def look_after(self, silent_s: float) -> float:
        """Called with every heartbeat: see to its log. Returns for how long it has lately waited for a core.

        `silent_s` is the time since its last message.
        """

    def kill(self) -> None:
        """End it now, with every process it started."""

    async def wait(self, deadline_s: float) -> None:
        """Wait for its exit; kill it when the deadline passes."""

    async def exit_cause(self) -> str:
        """How it ended, and the last lines it wrote."""

    async def close(self) -> None:
        """Give back what was held for it; it must have ended, or be out of reach."""


class Launcher(Protocol):
    """Starts processes for instances."""

    async def launch(self, id: int, spec: InstanceSpec, devices: InstanceDevices, options: HostingConfig) -> Child:
        """Start a process for instance `id` and connect to it; nothing is left if that fails or is cancelled."""


class LocalChild:
    """A child process of this machine."""

    node: str | None = None
    node_name: str | None = None
    clock = ClockOffset()

    def __init__(self, process: ChildProcess, channel: Channel[Up], spec: InstanceSpec) -> None:
        self._process = process
        self.channel = channel
        self.spec = spec
        self._starvation = Starvation(process.pid)

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._process.pid

    async def free_port(self) -> int:
        """Of this machine."""
        return free_ports(EVERY_ADDRESS, 1)[0]

    async def localized(self, command: Command) -> Command:
        """Every path of the driver is its own."""
        return command

    def look_after(self, silent_s: float) -> float:
        """Bound its log, and ask the kernel how long it waited."""
        self._process.bound_log()
        return self._starvation.growth_s()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    async def wait(self, deadline_s: float) -> None:
        """Wait for its exit."""
        await self._process.wait(deadline_s)

    async def exit_cause(self) -> str:
        """Status and log."""
        return self._process.exit_cause()

    async def close(self) -> None:
        """Close its log."""
        self._process.close()


class LocalLauncher:
    """Starts processes on this machine."""

    async def launch(self, id: int, spec: InstanceSpec, devices: InstanceDevices, options: HostingConfig) -> Child:
        """A new interpreter with one end of a socket pair."""
        process = ChildProcess(
            f"instance-{id}",
            options.log_dir,
            module="seer.hosting.child",
            single_thread=devices.cores is not None,
            environment=devices.environment,
            imports=(spec.factory.partition(":")[0],),
        )
        try:
            return LocalChild(process, await Channel.over(process.socket, _decoder), spec)
        except BaseException:
            process.kill()
            await process.wait(options.close_deadline_s)
            process.close()
            raise


class DialledChild:
    """A process that dialled in, and whose life is another program's affair: only its connection is ours."""

    def __init__(self, connection: Connection, spec: InstanceSpec) -> None:
        self.channel, self.clock = connection.channel, connection.clock
        self.spec = spec
        self.pid: int | None = None
        peer = self.channel.socket.getpeername()
        self.node: str | None = str(peer[0])
        self.node_name = self.node

    async def free_port(self) -> int:
        """Nothing is known of its machine."""
        raise InstanceError(f"an instance that dials in, from {self.node}, cannot share experts with others")

    async def localized(self, command: Command) -> Command:
        """Paths must be of storage that both machines share."""
        return command

    def look_after(self, silent_s: float) -> float:
        """Its log is not ours, and nothing is known of its cores."""
        return 0.0

    def kill(self) -> None:
        """Hang up; it serves no longer."""
        self.channel.abort()

    async def wait(self, deadline_s: float) -> None:
        """Only its connection can be waited for, and that has ended or is dropped."""

    async def exit_cause(self) -> str:
        """Unknown from here."""
        return f"the connection to {self.node} ended"

    async def close(self) -> None:
        """Nothing is held."""


class DialLauncher:
    """Has processes started by `start`, which gets each its `Dial`, and waits until they dial in."""

    def __init__(self, listener: Listener, start: Callable[[int, Dial], Awaitable[None]]) -> None:
        """`start(id, dial)` returns when the process has its `Dial`, or raises if there will be none."""
        self._listener = listener
        self._start = start

    async def launch(self, id: int, spec: InstanceSpec, devices: InstanceDevices, options: HostingConfig) -> Child:
        """Wait for the process within the deadline of a start."""
        dial, come = self._listener.expect()
        try:
            async with asyncio.timeout(options.start_deadline_s):
                await self._start(id, dial)
                return DialledChild(await come, spec)
        except BaseException as error:
            abandon(come)
            if isinstance(error, TimeoutError):
                what = f"waiting for the process of instance {id}"
                raise DeadlineExceeded(what, options.start_deadline_s) from None
            raise
