"""Frames over a local socket: four bytes of length, then that many bytes of msgpack.

Both ends live on one machine and are of one version: there is no negotiation, and a frame that does not
decode is a programming error. End of file means that the other process is gone.
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
MAX_FRAME_BYTES = 1 << 30
"""A frame above this is a broken stream, not a message."""

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
        """Take a connected socket over."""
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, decoder)

    def send(self, message: object) -> None:
        """Queue a message; never waits. What is sent to a process that is gone is lost."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def receive(self) -> T | None:
        """The next message, or None when the other process is gone."""
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
        """Hang up."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def receive_blocking(sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """The next message of a blocking socket, for the one frame that precedes the event loop."""
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
