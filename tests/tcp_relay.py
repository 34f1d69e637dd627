# SPDX-License-Identifier: Apache-2.0
"""A relay for TCP connections that cuts, holds, falsifies and slows them, and tears their bytes into small pieces.

It knows nothing of what is inside: between machines the bytes are encrypted.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import Literal

LinkFault = Literal["cut", "hold", "falsify", "slow", "tear"]
Direction = Literal["up", "down"]
PART_BYTES = 1 << 16
PAUSE_S = 0.3
NUM_SLOW_PARTS = 5
NUM_TORN_BYTES = 2000


class TcpRelay:
    """Listens on a loopback port and passes connections on to the driver's."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listening = socket.create_server((host, 0))
        self.port: int = self._listening.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._asked: dict[Direction, queue.SimpleQueue[LinkFault]] = {
            "up": queue.SimpleQueue(),
            "down": queue.SimpleQueue(),
        }
        threading.Thread(target=self._accept, daemon=True).start()

    def strike(self, direction: Direction, fault: LinkFault) -> None:
        """Disturb what comes next from the instance up to the driver, or down to the instance."""
        self._asked[direction].put(fault)

    def close(self) -> None:
        """Listen no more, and cut what is connected."""
        for end in (self._listening, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                instance, _ = self._listening.accept()
                driver = socket.create_connection(self._target)
                self._ends += [instance, driver]
                for asked, source, target in (
                    (self._asked["up"], instance, driver),
                    (self._asked["down"], driver, instance),
                ):
                    threading.Thread(target=self._relay, args=(source, target, asked), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket, asked: queue.SimpleQueue[LinkFault]) -> None:
        with contextlib.suppress(OSError):
            num_slow = 0
            while part := source.recv(PART_BYTES):
                fault = None
                with contextlib.suppress(queue.Empty):
                    fault = asked.get_nowait()
                if fault == "cut":
                    break
                if fault == "hold":
                    return  # as a cable that was pulled: neither end hears of it
                if fault == "falsify":
                    part = part[:-1] + bytes([part[-1] ^ 1])
                num_slow = NUM_SLOW_PARTS if fault == "slow" else max(0, num_slow - 1)
                if num_slow:
                    time.sleep(PAUSE_S)
                _send(target, part, is_torn=fault == "tear")
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _send(target: socket.socket, part: bytes, *, is_torn: bool) -> None:
    if is_torn:
        for byte in part[:NUM_TORN_BYTES]:
            target.sendall(bytes([byte]))
        part = part[NUM_TORN_BYTES:]
    target.sendall(part)
