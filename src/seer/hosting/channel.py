# SPDX-License-Identifier: Apache-2.0
"""Frames over a socket: the length and the number of the frame, then that many bytes of msgpack.

Both processes have the same version of Seer: on one machine they import one, and between machines the handshake made
sure of it (remote/handshake.py). A frame that does not decode is a `BadFrame`: the other process is broken. End of file
means that it has ended, or that the connection to its machine has.

Invariant: messages are received in the order in which they were sent, each once. A frame that comes twice is dropped,
one that comes early waits for those before it, and one that does not come breaks the channel.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Generic, TypeVar

import msgspec

from seer.errors import ConfigError, InstanceError
from seer.machine.json_files import UNREADABLE

T = TypeVar("T")

HEAD = struct.Struct("<IQ")
"""Length and number. Four bytes hold every length up to MAX_FRAME_BYTES."""
MAX_FRAME_BYTES = 1 << 30
"""Far above any batch of outputs: a longer frame means a broken stream, not a message."""

CLOSE_DEADLINE_S = 1.0
"""TLS says goodbye in both directions."""

MAX_EARLY_FRAMES = 8
"""Frames that wait for an earlier one: with more of them the earlier one counts as lost. Heartbeats are frames too, so
a loss is found within a few seconds."""


class BadFrame(InstanceError):  # noqa: N818 - reads as what it is
    """The other process sent what is no message."""


_encoder = msgspec.msgpack.Encoder()


def frame(message: object, number: int = 0) -> bytes:
    """One message as bytes on the wire; `number` counts the messages that were sent before it."""
    body = _encoder.encode(message)
    return HEAD.pack(len(body), number) + body


class Channel(Generic[T]):
    """One end of the connection: sends anything, receives messages of one union."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[T],
        num_received: int,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._num_sent = 0
        self._num_received = num_received
        self._closing: asyncio.Future[None] | None = None
        self._early: dict[int, bytes] = {}  # frames by number, received before those they follow
        self.lost_a_frame = False
        """Whether the channel ended because a frame did not come, not because the other process ended."""

    @classmethod
    async def over(
        cls, sock: socket.socket, decoder: msgspec.msgpack.Decoder[T], *, num_received: int = 0
    ) -> Channel[T]:
        """A channel over a connected socket, which it owns from now on; `num_received` frames were read before."""
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, decoder, num_received)

    @property
    def socket(self) -> socket.socket:
        """The socket below, to be watched and not to be read."""
        found: socket.socket = self._writer.get_extra_info("socket")
        return found

    def send(self, message: object) -> None:
        """Queue a message without waiting. A message to a process that has ended is dropped."""
        if not self._writer.is_closing():
            self._writer.write(frame(message, self._num_sent))
            self._num_sent += 1

    async def receive(self) -> T | None:
        """The next message, or None when the other process has ended or a frame was lost. BadFrame for no message."""
        try:
            while self._num_received not in self._early:
                length, number = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                if length > MAX_FRAME_BYTES:
                    raise BadFrame(f"a frame of {length} bytes, and {MAX_FRAME_BYTES} are the limit")
                body = await self._reader.readexactly(length)
                if number >= self._num_received:
                    self._early[number] = body
                if len(self._early) > MAX_EARLY_FRAMES:
                    self.lost_a_frame = True
                    return None
        except (asyncio.IncompleteReadError, OSError):  # ssl.SSLError and a timeout of TCP are no ConnectionError
            return None
        body = self._early.pop(self._num_received)
        self._num_received += 1
        return self._decode(body)

    def _decode(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except (*UNREADABLE, ConfigError, AssertionError) as error:  # the last two: a field that contradicts another
            raise BadFrame(f"a frame that is no message: {error}") from None

    async def flush(self) -> None:
        """Wait until everything queued has left this process."""
        try:
            await self._writer.drain()
        except OSError:
            return

    def abort(self) -> None:
        """Close the connection now; what is queued is dropped, and `receive` returns None."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close the connection; one that does not close within CLOSE_DEADLINE_S, as over a cut link, is dropped."""
        self._writer.close()
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._writer.wait_closed())
        # Waited for, not awaited: a wait that is cancelled would make every later one fail.
        if not (await asyncio.wait({self._closing}, timeout=CLOSE_DEADLINE_S))[0]:
            self.abort()
            await asyncio.wait({self._closing}, timeout=CLOSE_DEADLINE_S)
        if self._closing.done() and not self._closing.cancelled():
            self._closing.exception()  # whatever it was, the connection is closed


def receive_blocking(sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The next message of a blocking socket, where frames come in order."""
    length, _ = HEAD.unpack(_read_exactly(sock, HEAD.size))
    return decoder.decode(_read_exactly(sock, length))


def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = sock.recv(num_bytes - len(parts))
        if not part:
            raise SystemExit("the driver is gone")
        parts += part
    return bytes(parts)
