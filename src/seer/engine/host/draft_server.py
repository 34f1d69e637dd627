"""The draft server of a fleet, in a process of its own on a loopback port the system chooses.

Run as a module it is that process: it says its address over the socket it was given and serves until the
driver is gone. If it dies, instances go on with the drafts they have: nothing waits for it but `start`.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from seer.engine.host.child import exit_with_driver
from seer.engine.host.launch import ChildProcess
from seer.errors import DeadlineExceeded, DraftError

START_DEADLINE_S = 60.0
CLOSE_DEADLINE_S = 5.0
_ADDRESS = "tcp://127.0.0.1:*"


class DraftServerProcess:
    """Starts and ends the process."""

    def __init__(self) -> None:
        self._child: ChildProcess | None = None
        self.address = ""

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._child.pid if self._child is not None else None

    async def start(self) -> None:
        """Launch it and learn its address."""
        self._child = child = ChildProcess("draft-server", None, module=__name__, single_thread=True)
        child.socket.setblocking(False)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                said = await asyncio.get_running_loop().sock_recv(child.socket, 1024)
        except TimeoutError:
            await self.close()
            raise DeadlineExceeded("the start of the draft server", START_DEADLINE_S) from None
        self.address = said.decode()
        if not self.address:
            await child.wait(CLOSE_DEADLINE_S)
            cause = child.exit_cause()
            await self.close()
            raise DraftError(f"the draft server died while starting: {cause}")

    async def close(self) -> None:
        """End it; it holds nothing that is needed afterwards."""
        child, self._child = self._child, None
        if child is not None:
            child.socket.close()
            child.kill()
            await child.wait(CLOSE_DEADLINE_S)
            child.close()


def main() -> None:
    """Serve."""
    from seer.drafting.server import DraftServer, ServerConfig  # noqa: PLC0415 - only the child serves

    sock = socket.socket(fileno=int(sys.argv[1]))
    exit_with_driver(sock)
    server = DraftServer(ServerConfig(address=_ADDRESS))
    sock.sendall(server.address.encode())
    server.run()


if __name__ == "__main__":
    main()
