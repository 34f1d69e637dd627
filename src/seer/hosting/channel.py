# SPDX-License-Identifier: Apache-2.0
"""Frames over a local socket: four bytes of length, then that many bytes of msgpack.

Both processes run on one machine and import the same version of Seer: there is no negotiation, and a frame that does
not decode is a programming error. End of file means that the other process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
"""Four bytes hold every length up to MAX_FRAME_BYTES."""
MAX_FRAME_BYTES = 1 << 30
"""Far above any batch of outputs: a longer frame means a broken stream, not a message."""

_encoder = msgspec.msgpack.Encoder()


def frame(message: object) -> bytes:
    """One message as bytes on the wire."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Channel(Generic[T]):
    """One end of the connection: sends anything, receives messages of one union."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[T]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder

    @classmethod
    async def over(cls, sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> Channel[T]:
        """A channel over a connected socket, which it owns from now on."""
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, decoder)

    def send(self, message: object) -> None:
        """Queue a message without waiting. A message to a process that has ended is dropped."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def receive(self) -> T | None:
        """The next message, or None when the other process has ended."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            assert length <= MAX_FRAME_BYTES, f"frame of {length} bytes"
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def flush(self) -> None:
        """Wait until everything queued has left this process."""
        try:
            await self._writer.drain()
        except ConnectionError:
            return

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def receive_blocking(sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The next message of a blocking socket, for the one frame that comes before the event loop runs."""
    (length,) = _LENGTH.unpack(_read_exactly(sock, _LENGTH.size))
    return decoder.decode(_read_exactly(sock, length))


def _read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = sock.recv(num_bytes - len(parts))
        if not part:
            raise SystemExit("the driver is gone")
        parts += part
    return bytes(parts)
