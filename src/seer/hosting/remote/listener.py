# SPDX-License-Identifier: Apache-2.0
"""Where a driver waits for its instances' processes on other machines.

Invariants
  1. A connection is handed out only after its process has proved to know the secret of a launch that is awaited, and a
     launch is handed out once.
  2. Peers that prove nothing cost bounded time and memory: at most MAX_HANDSHAKES of them at once, each for at most
     HANDSHAKE_DEADLINE_S; further ones wait in the system's queue.
  3. Off loopback every byte is encrypted (TLS 1.3 with the driver's own certificate, which a `Dial` carries).

Waits for                                    unblocked by
  a connection (the accept task)               a peer, `close`
  a free handshake                             the end of another, at the latest its deadline
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from dataclasses import dataclass

import msgspec

from seer.errors import InputError, InstanceError
from seer.hosting.channel import Channel
from seer.hosting.messages import Up
from seer.hosting.remote.certificate import OwnCertificate, make_certificate
from seer.hosting.remote.clock import ClockOffset
from seer.hosting.remote.dial import Dial, is_loopback
from seer.hosting.remote.handshake import HANDSHAKE_DEADLINE_S, VersionDiffers, welcome
from seer.machine.descriptors import allow_descriptors

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 64
"""At once. Each holds one connection and some hundred kilobytes of buffers at most."""
_BACKLOG = 1024
"""Connections that wait in the system: as many as instances may start at once."""
_SECRET_BYTES = 32

_decoder: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


@dataclass(frozen=True, slots=True)
class Connection:
    """A process that proved itself."""

    channel: Channel[Up]
    clock: ClockOffset


def abandon(come: asyncio.Future[Connection]) -> None:
    """Nobody takes this connection: expect it no more, or hang up if it has come, so that its process knows."""
    if not come.cancel() and not come.cancelled() and come.exception() is None:
        come.result().channel.abort()


class Listener:
    """One listening socket for all processes of a fleet."""

    def __init__(self, host: str, *, encrypted: bool | None = None) -> None:
        """`host` is this machine's address as the other machines know it. `encrypted`: None is everywhere but on
        loopback.
        """
        self.host = host
        self._is_encrypted = not is_loopback(host) if encrypted is None else encrypted
        self.port = 0
        self._socket: socket.socket | None = None
        self._certificate: OwnCertificate | None = None
        self._awaited: dict[str, tuple[bytes, asyncio.Future[Connection]]] = {}
        self._free = asyncio.Semaphore(MAX_HANDSHAKES)
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on a free port, with room for a connection of every instance."""
        allow_descriptors()
        self._certificate = await asyncio.to_thread(make_certificate) if self._is_encrypted else None
        try:
            family = (await asyncio.get_running_loop().getaddrinfo(self.host, 0, type=socket.SOCK_STREAM))[0][0]
            self._socket = socket.create_server((self.host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise InputError(
                f"this machine cannot listen on {self.host}: {error}", hint="it must be one of its own addresses"
            ) from None
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(self._socket))

    def expect(self) -> tuple[Dial, asyncio.Future[Connection]]:
        """Wait for one more process: what it must be given, and its connection once it has come."""
        launch, secret = secrets.token_hex(8), secrets.token_bytes(_SECRET_BYTES)
        come: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        come.add_done_callback(lambda _: self._awaited.pop(launch, None))  # also when it is cancelled
        self._awaited[launch] = (secret, come)
        pem = self._certificate.pem if self._certificate is not None else None
        return Dial(host=self.host, port=self.port, launch=launch, secret=secret, certificate=pem), come

    async def close(self) -> None:
        """Listen no more. Connections that were handed out stay open."""
        tasks = [*self._handshakes, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for _, come in list(self._awaited.values()):
            come.cancel()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._free.acquire()
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:  # the peer is gone, or no descriptor is left; a cancellation passes
                log.warning("a connection was not accepted: %s", error)
                self._free.release()
                await asyncio.sleep(0.1)
                continue
            task = asyncio.create_task(self._take(accepted))
            self._handshakes.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        self._free.release()

    async def _take(self, accepted: socket.socket) -> None:
        """Shake hands with a peer; drop it if that fails."""
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        is_taken = False
        try:
            async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
                streams = await self._streams(accepted)
                expected = {launch: secret for launch, (secret, _) in self._awaited.items()}
                launch, clock = await welcome(*streams, expected)
            is_taken = self._hand_out(launch, Connection(Channel(*streams, _decoder, 0), clock))
        except VersionDiffers as error:
            self._fail(error.launch, error)
        except (TimeoutError, OSError, EOFError, InstanceError) as error:
            log.warning("a connection was dropped: %s", error or type(error).__name__)
        finally:
            if not is_taken:
                await _drop(accepted, streams[1] if streams is not None else None)

    def _hand_out(self, launch: str, connection: Connection) -> bool:
        awaited = self._awaited.pop(launch, None)
        if awaited is None or awaited[1].done():
            return False
        awaited[1].set_result(connection)
        return True

    def _fail(self, launch: str, error: InstanceError) -> None:
        awaited = self._awaited.pop(launch, None)
        if awaited is not None and not awaited[1].done():
            awaited[1].set_exception(error)

    async def _streams(self, accepted: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        context = self._certificate.context if self._certificate is not None else None
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=context)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _drop(accepted: socket.socket, writer: asyncio.StreamWriter | None) -> None:
    if writer is None:  # TLS failed: the transport has closed it, or there is none yet
        accepted.close()
        return
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):  # a reason may be on its way
            await writer.drain()
    writer.transport.abort()
