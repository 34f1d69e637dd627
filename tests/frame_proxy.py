# SPDX-License-Identifier: Apache-2.0
"""A relay between the driver and an instance that delays, doubles, drops and reorders their messages.

`proxied` puts one into every instance that is started under it. A relay passes frames on unchanged until it is asked
for a disturbance; the first frame of each direction, which starts the instance, is never disturbed.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from seer.hosting import launcher
from seer.hosting.channel import HEAD
from seer.hosting.launch import ChildProcess

Disturbance = Literal["delay", "double", "drop", "reorder"]
DELAY_S = 0.3


class FrameProxy:
    """Relays between the socket of a child and a new one, which the driver gets."""

    def __init__(self, child: socket.socket) -> None:
        self.driver_end, ours = socket.socketpair()
        self._ends = (child, ours)
        self._num_relaying = 2
        self._lock = threading.Lock()
        self._asked: dict[str, queue.SimpleQueue[Disturbance]] = {name: queue.SimpleQueue() for name in ("up", "down")}
        for name, source, target in (("up", child, ours), ("down", ours, child)):
            threading.Thread(target=self._relay, args=(source, target, self._asked[name]), daemon=True).start()

    def disturb(self, direction: Literal["up", "down"], what: Disturbance) -> None:
        """Disturb the next frame of a direction: from the instance up to the driver, or down to the instance."""
        self._asked[direction].put(what)

    def _relay(self, source: socket.socket, target: socket.socket, asked: queue.SimpleQueue[Disturbance]) -> None:
        with contextlib.suppress(OSError, EOFError):
            target.sendall(_read_frame(source))
            while True:
                frames = [_read_frame(source)]
                with contextlib.suppress(queue.Empty):
                    frames = _disturbed(frames[0], asked.get_nowait(), source)
                for frame in frames:
                    target.sendall(frame)
        for end in self._ends:  # not closed yet: the other thread may use them
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._num_relaying -= 1
            is_last = not self._num_relaying
        if is_last:
            for end in self._ends:
                end.close()


def _disturbed(frame: bytes, what: Disturbance, source: socket.socket) -> list[bytes]:
    if what == "delay":
        time.sleep(DELAY_S)
    elif what == "double":
        return [frame, frame]
    elif what == "drop":
        return []
    elif what == "reorder":
        return [*(_read_frame(source) for _ in range(2)), frame]
    return [frame]


def _read_frame(source: socket.socket) -> bytes:
    head = _read(source, HEAD.size)
    return head + _read(source, HEAD.unpack(head)[0])


def _read(source: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = source.recv(num_bytes - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


class ProxiedChild(ChildProcess):
    """A child process behind a relay."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.proxy = FrameProxy(self.socket)
        self.socket = self.proxy.driver_end


@contextlib.contextmanager
def proxied() -> Iterator[None]:
    """Start instances behind relays from now on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "ChildProcess", ProxiedChild)
        yield
