# SPDX-License-Identifier: Apache-2.0
"""The actor of one instance: starts its process on this node, waits for its end, and hands out its log.

The process is the same as on one machine, with a socket pair to this actor: it ends when the actor does, even by
`kill -9`. Nothing of an engine is imported here.
"""

from __future__ import annotations

import os

from seer.hosting.channel import frame
from seer.hosting.launch import ChildProcess
from seer.hosting.remote.dial import Dial
from seer.hosting.starvation import Starvation
from seer.machine.addresses import EVERY_ADDRESS, free_ports

LOG_PART_BYTES = 256 << 10
"""Of a log, in one answer."""


class InstanceHost:
    """Methods are called by the driver through Ray, several at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: ChildProcess | None = None
        self._starvation: Starvation | None = None

    async def start(self, dial: Dial, factory_module: str, single_thread: bool) -> int:
        """Start the process and give it its driver; returns its process id."""
        assert self._process is None, "one process per actor"
        self._process = process = ChildProcess(
            self._name,
            None,
            module="seer.hosting.child",
            single_thread=single_thread,
            arguments=("dial",),
            imports=(factory_module,),
        )
        self._starvation = Starvation(process.pid)
        process.socket.sendall(frame(dial))
        return process.pid

    async def wait(self) -> str:
        """Wait for the end of the process; returns how it ended, with the last lines it wrote."""
        assert self._process is not None, "nothing was started"
        await self._process.ended()
        return self._process.exit_cause()

    async def kill(self) -> None:
        """End the process now, with those it started."""
        if self._process is not None:
            self._process.kill()

    async def free_port(self) -> int:
        """A port of this node that nothing listens on."""
        return free_ports(EVERY_ADDRESS, 1)[0]

    async def waited_s(self) -> float:
        """For how long the process waited for a core since the last call, by the kernel of this node."""
        return self._starvation.growth_s() if self._starvation is not None else 0.0

    async def read_log(self, offset: int) -> tuple[int, bytes]:
        """What the process wrote after `offset`, and where that ends. A log that was cut is read from its beginning."""
        if self._process is None:
            return 0, b""
        self._process.bound_log()
        log = self._process.log_descriptor
        if os.fstat(log).st_size < offset:
            offset = 0
        part = os.pread(log, LOG_PART_BYTES, offset)
        return offset + len(part), part
