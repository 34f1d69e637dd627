# SPDX-License-Identifier: Apache-2.0
"""The draft server: token logs behind a socket.

One thread serves one ROUTER socket and one store; a second one lets clients in (curve_keys.py). Every
message gets exactly one answer; a frame that cannot be read gets Refused. Nothing that a peer sends can stop the loop.

Waits for: a frame, a stop, or the next time to expire groups. No wait is longer than until that time.

Memory: the logs have their limit (log.py). A client that does not read its answers loses those beyond QUEUED_MESSAGES,
and asks again. ZeroMQ sets no bound to a message of many frames, so a process that serves calls `bound_memory`: beyond
the logs' limit and SPARE_BYTES the system refuses it memory and it ends. Of peers without keys only handshakes reach
ZeroMQ, over at most MAX_CONNECTIONS.
"""

import logging
import os
import resource
import secrets
import time
from dataclasses import dataclass, field

import zmq

from seer.drafting.curve_keys import ServerKeys
from seer.drafting.log import LogLimits, LogStore
from seer.drafting.wire import (
    MAX_MESSAGE_BYTES,
    Ask,
    Done,
    Drop,
    Fetch,
    Fetched,
    Push,
    Pushed,
    Refused,
    Register,
    Reply,
    Status,
    WireError,
    decode,
    encode,
)
from seer.errors import DraftError

logger = logging.getLogger(__name__)

_EXPIRE_EVERY_S = 1.0
"""Times to live are minutes: a second more does not matter."""
_FRAMES_AT_ONCE = 1000
"""Frames served before stop and expiry are looked at again, so that a flood does not delay them for long."""
QUEUED_MESSAGES = 16
"""Per client and direction. A client waits for the answers to one push and one fetch at a time."""
MAX_CONNECTIONS = 1024
"""Open files of a server process, about one per connection. Instances have one connection each."""
SPARE_BYTES = 512 << 20
"""Beyond the logs: the interpreter, and what ZeroMQ queues for a normal number of clients."""
_REPLY_BYTES = 1 << 20
"""Tokens per answer: a client decodes them in one go with the interpreter locked, and its engine waits for that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Settings of a draft server."""

    address: str
    """Where to listen; a port of * lets the system choose."""

    keys: ServerKeys
    """The server's own key and the client key it lets in (curve_keys.py)."""

    limits: LogLimits = field(default_factory=LogLimits)


def bound_memory(limits: LogLimits) -> None:
    """Bound the memory and the connections of this process, which serves and does nothing else."""
    _lower(resource.RLIMIT_DATA, limits.memory_bytes + SPARE_BYTES)
    _lower(resource.RLIMIT_NOFILE, MAX_CONNECTIONS)


def _lower(limit: int, value: int) -> None:
    _, highest = resource.getrlimit(limit)
    value = value if highest == resource.RLIM_INFINITY else min(value, highest)
    resource.setrlimit(limit, (value, value))


def answer(store: LogStore, server: int, message: object, now: float) -> Reply:
    """Return the answer to one decoded message."""
    match message:
        case Push():
            lengths = [store.append(message.weights_version, tail, now) for tail in message.tails]
            return Pushed(message.sequence, server, lengths)
        case Fetch():
            found = store.fetch(message.weights_version, message.known, _REPLY_BYTES, now)
            return Fetched(message.sequence, server, *found)
        case Register():
            store.register(message.weights_version, message.groups, message.ttl_s, now)
            return Done(message.sequence, server)
        case Drop():
            store.drop(message.weights_version, message.groups)
            return Done(message.sequence, server)
        case Ask():
            return Status(message.sequence, server, *store.stats())
        case _:
            return Refused(0, server, f"a server does not take {type(message).__name__}")


class DraftServer:
    """Listens from construction on; `run` serves until `stop`."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._number = secrets.randbits(63)  # a restarted server has another: clients see that its logs are gone
        self._store = LogStore(self._config.limits)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        self._wake_read, self._wake_write = os.pipe()
        self._authenticator = self._config.keys.secure(self._socket, self._context)
        try:
            self._socket.bind(self._config.address)
        except zmq.ZMQError as problem:
            self._close()
            raise DraftError(
                f"draft server cannot listen on {self._config.address}: {problem}",
                hint="does another process listen there?",
            ) from None

    @property
    def address(self) -> str:
        """Where it listens, with the port that the system chose."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def run(self) -> None:
        """Serve until `stop` is called; then answer what has arrived and close."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        expire_at = time.monotonic() + _EXPIRE_EVERY_S
        try:
            while True:
                timeout_s = max(expire_at - time.monotonic(), 0.0)
                ready = dict(poller.poll(int(timeout_s * 1000) + 1))
                self._serve_waiting()
                if self._wake_read in ready:
                    return
                if time.monotonic() >= expire_at:
                    self._store.expire(time.monotonic())
                    expire_at = time.monotonic() + _EXPIRE_EVERY_S
        finally:
            self._close()

    def stop(self) -> None:
        """Ask `run` to return; may be called from any thread and from a signal handler."""
        os.write(self._wake_write, b"x")

    def _serve_waiting(self) -> None:
        for _ in range(_FRAMES_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = self._reply(frames[1:])
            # ZeroMQ takes in only now and then what peers have read. Without this it finds a peer's queue full where it
            # is not, and drops an answer that the peer waits for.
            self._socket.getsockopt(zmq.EVENTS)
            try:
                self._socket.send_multipart([frames[0], encode(reply)], zmq.NOBLOCK)
            except zmq.ZMQError as problem:
                logger.debug("answer not delivered: %s", problem)

    def _reply(self, frames: list[bytes]) -> Reply:
        if len(frames) != 1:
            return Refused(0, self._number, f"a message is one frame, got {len(frames)}")
        try:
            message = decode(frames[0])
        except WireError as problem:
            return Refused(0, self._number, str(problem))
        return answer(self._store, self._number, message, time.monotonic())

    def _close(self) -> None:
        self._socket.close()
        self._authenticator.stop()
        self._context.term()
        # The wake pipe stays open as long as the object: a late stop() must find its descriptor.

    def __del__(self) -> None:
        for descriptor in (self._wake_read, self._wake_write):
            os.close(descriptor)
