# SPDX-License-Identifier: Apache-2.0
"""The draft server of a fleet, in its own process on a port the system chooses: on loopback, or on the driver's address
where instances run on other machines.

Run as a module it is that process: it reads its settings from the driver's socket, answers with its address, and
serves until the driver is gone. If it dies it is started again at the same address with the same keys, a limited
number of times an hour (restart_budget.py). Until it is back instances draft from their own indexes; then they send it
what they hold.

Keys are made afresh for every fleet. They travel over socket pairs only, never on a command line or in the
environment, so that other users of the machine cannot read them.

Waits for                                    unblocked by
  its address, after launch                    the process, its death, START_DEADLINE_S
  its end (`_watch`)                           its death, `close`
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys

import msgspec

from seer.drafting.curve_keys import ClientKeys, ServerKeys, make_keys
from seer.errors import DeadlineExceeded, DraftError, SeerError
from seer.hosting.channel import frame, receive_blocking
from seer.hosting.child import exit_with_driver
from seer.hosting.launch import ChildProcess
from seer.hosting.restart_budget import RestartBudget
from seer.machine.addresses import LOOPBACK

log = logging.getLogger(__name__)

START_DEADLINE_S = 60.0
"""A fresh interpreter imports numpy and zmq: seconds on a machine that is busy starting engines."""
CLOSE_DEADLINE_S = 5.0
"""It was killed by then: only the kernel can be slow."""


class _Setup(msgspec.Struct, frozen=True):
    """The one message to the process."""

    address: str
    keys: ServerKeys


_decoder = msgspec.msgpack.Decoder(_Setup)


class DraftServerProcess:
    """Starts, restarts and ends the process."""

    def __init__(
        self,
        *,
        host: str = LOOPBACK,
        max_restarts: int = 3,
        restart_pause_s: float = 1.0,
        keys: tuple[ServerKeys, ClientKeys] | None = None,
    ) -> None:
        """Without `keys`, fresh ones."""
        self._host = host
        self._budget = RestartBudget(max_restarts, restart_pause_s)
        self._child: ChildProcess | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_up = asyncio.Event()
        self._is_down = asyncio.Event()
        self._keys, self.client_keys = keys or make_keys()
        self.address = ""
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """Process id, while there is a process."""
        return self._child.pid if self._child is not None else None

    async def start(self) -> None:
        """Launch the process and receive its address."""
        self.address = await self._launch(f"tcp://{self._host}:*")
        self._watcher = asyncio.create_task(self._watch())

    async def wait_until_up(self) -> None:
        """Wait until it serves again after a death; the caller sets the deadline."""
        await self._is_up.wait()

    def kill(self) -> None:
        """End the process now and do not restart it."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._child is not None:
            self._child.kill()

    async def close(self) -> None:
        """End the process; it holds nothing that a later run needs."""
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
            self._watcher = None
        await self._end()

    async def _launch(self, address: str) -> str:
        self._child = child = ChildProcess("draft-server", None, module=__name__, single_thread=True)
        with contextlib.suppress(ConnectionError):  # it died at once: no answer comes, and the cause is read below
            child.socket.sendall(frame(_Setup(address, self._keys)))
        child.socket.setblocking(False)
        line = b""
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                with contextlib.suppress(ConnectionError):  # it died before it read what it was sent
                    line = await asyncio.get_running_loop().sock_recv(child.socket, 1024)
        except TimeoutError:
            await self._end()
            raise DeadlineExceeded("the start of the draft server", START_DEADLINE_S) from None
        if not line:
            await child.wait(CLOSE_DEADLINE_S)
            cause = child.exit_cause()
            await self._end()
            raise DraftError(f"the draft server died while starting: {cause}")
        self._is_down.clear()
        self._is_up.set()
        return line.decode()

    async def _watch(self) -> None:
        """Start it again after each death, as often as the budget allows."""
        while self._child is not None:
            with contextlib.suppress(ConnectionError):
                # After its address it sends nothing, so this returns when it ends.
                await asyncio.get_running_loop().sock_recv(self._child.socket, 1)
            self._is_up.clear()
            self._is_down.set()
            await self._end()
            while self._child is None and await self._may_restart():
                self.num_restarts += 1
                try:
                    await self._launch(self.address)
                    log.warning("the draft server died and was started again")
                except (SeerError, OSError, MemoryError) as error:  # no process can be made now
                    log.warning("the draft server cannot be started again: %s", error)

    async def _may_restart(self) -> bool:
        """Wait until the budget allows a restart, and count it; False if it never will."""
        now_s = asyncio.get_running_loop().time
        while (pause_s := self._budget.pause_s(now_s())) is None:
            log.warning("no draft server is left: instances draft from their own responses only")
            wait_s = self._budget.renewed_in_s(now_s())
            if wait_s is None:
                return False
            await asyncio.sleep(wait_s)
        await asyncio.sleep(pause_s)
        self._budget.spend(now_s())
        return True

    async def _end(self) -> None:
        child = self._child
        if child is not None:
            child.socket.close()
            child.kill()
            await child.wait(CLOSE_DEADLINE_S)  # if this is cancelled, `close` ends it
            child.close()
            self._child = None


def main() -> None:
    """Serve until the driver ends."""
    from seer.drafting.server import DraftServer, ServerConfig, bound_memory

    sock = socket.socket(fileno=int(sys.argv[1]))
    exit_with_driver(sock)
    setup = receive_blocking(sock, _decoder)
    config = ServerConfig(address=setup.address, keys=setup.keys)
    bound_memory(config.limits)
    server = DraftServer(config)
    sock.sendall(server.address.encode())
    server.run()


if __name__ == "__main__":
    main()
