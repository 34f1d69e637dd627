# SPDX-License-Identifier: Apache-2.0
"""A hosting whose instances dial in over TCP and TLS, as on a Ray cluster, without a cluster: for many cheap faults.

Each process is started by an `InstanceHost`, the object that is an actor on a node, and reaches the driver through a
relay that can be struck (tcp_relay.py). Everything is on this machine, so the fleet shares its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from seer.config import HostingConfig, RolloutConfig
from seer.engine.prepare import InstanceSpec
from seer.errors import DeadlineExceeded, InstanceError
from seer.hosting import fleet
from seer.hosting.devices import InstanceDevices
from seer.hosting.fleet_pool import FleetPool
from seer.hosting.launcher import Child
from seer.hosting.messages import Command
from seer.hosting.ray.instance_host import InstanceHost
from seer.hosting.remote.listener import Connection, Listener
from tcp_relay import TcpRelay

HERE = "127.0.0.1"


class DialledProcess:
    """Implements `seer.hosting.launcher.Child` for a process of an `InstanceHost`."""

    node: str | None = HERE
    node_name: str | None = HERE

    def __init__(self, connection: Connection, spec: InstanceSpec, host: InstanceHost, relay: TcpRelay) -> None:
        self.channel, self.clock, self.spec = connection.channel, connection.clock, spec
        self.relay = relay
        self._host = host
        assert host._process is not None, "it has dialled in"
        self._process = host._process
        self.pid: int | None = self._process.pid

    async def free_port(self) -> int:
        raise NotImplementedError("no test has instances that share experts dial in")

    async def localized(self, command: Command) -> Command:
        return command

    def look_after(self, silent_s: float) -> float:
        assert self._host._starvation is not None, "it was started"
        return self._host._starvation.growth_s()

    def kill(self) -> None:
        self._process.kill()

    async def wait(self, deadline_s: float) -> None:
        await self._process.wait(deadline_s)

    async def exit_cause(self) -> str:
        return self._process.exit_cause()

    async def close(self) -> None:
        self.relay.close()
        self._process.socket.close()
        self._process.close()


class TcpLauncher:
    """Implements `seer.hosting.launcher.Launcher`."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    async def launch(self, id: int, spec: InstanceSpec, devices: InstanceDevices, options: HostingConfig) -> Child:
        host = InstanceHost(f"instance-{id}")
        dial, come = self._listener.expect()
        relay = TcpRelay(dial.host, dial.port)
        try:
            async with asyncio.timeout(options.start_deadline_s):
                await host.start(replace(dial, port=relay.port), spec.factory.partition(":")[0], single_thread=True)
                while not (await asyncio.wait({come}, timeout=0.1))[0]:
                    if host._process is not None and host._process._process.poll() is not None:
                        raise InstanceError(f"instance {id} died while starting: {host._process.exit_cause()}")
                return DialledProcess(come.result(), spec, host, relay)
        except BaseException as error:
            relay.close()
            await _end(host, options.close_deadline_s)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"the start of instance {id}", options.start_deadline_s) from None
            raise
        finally:
            come.cancel()


async def _end(host: InstanceHost, deadline_s: float) -> None:
    """An actor's process takes these with it; here they are this process's."""
    await host.kill()
    if host._process is not None:
        await host._process.wait(deadline_s)
        host._process.socket.close()
        host._process.close()


class TcpHosting:
    """Implements `seer.hosting.hostings.Hosting`."""

    is_local = True
    host = HERE

    def __init__(self) -> None:
        self._listener = Listener(HERE, encrypted=True)
        self.launcher = TcpLauncher(self._listener)

    async def start(self) -> None:
        await self._listener.start()

    async def tidy(self) -> None:
        """The pool is this machine's own."""

    async def close(self) -> None:
        await self._listener.close()


@contextlib.contextmanager
def over_tcp() -> Iterator[None]:
    """Start the instances of fleets over TCP from now on."""

    def make(config: RolloutConfig, pool: FleetPool | None) -> TcpHosting:
        return TcpHosting()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "make_hosting", make)
        yield
