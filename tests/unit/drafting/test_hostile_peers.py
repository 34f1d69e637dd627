# SPDX-License-Identifier: Apache-2.0
"""Peers that send without end, do not read, or send again what others sent: the server's memory stays bounded."""

from __future__ import annotations

import contextlib
import os
import re
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from draft_servers import ANY_PORT, CLIENT_KEYS, DEADLINE_S, SERVER_KEYS, server_status, serving
from seer.drafting.client import ClientConfig, DraftClient
from seer.drafting.server import QUEUED_MESSAGES, SPARE_BYTES
from seer.drafting.wire import Ask, Fetch, Fetched, Known, Push, Tail, decode, encode

MEMORY_BYTES = 50 << 20
SERVE = f"""
import sys
from seer.drafting.curve_keys import ServerKeys
from seer.drafting.log import LogLimits
from seer.drafting.server import DraftServer, ServerConfig, bound_memory

limits = LogLimits(memory_bytes={MEMORY_BYTES})
keys = ServerKeys(secret_key=sys.argv[1], client_public_key=sys.argv[2])
server = DraftServer(ServerConfig(address="{ANY_PORT}", keys=keys, limits=limits))
bound_memory(limits)
print(server.address, flush=True)
server.run()
"""


@contextlib.contextmanager
def a_server_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that bounds its memory as a fleet's do, and its address."""
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SERVE, SERVER_KEYS.secret_key, SERVER_KEYS.client_public_key]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            yield server, server.stdout.readline().strip()
        finally:
            server.kill()
            server.communicate()


@contextlib.contextmanager
def a_peer(address: str) -> Iterator[zmq.Socket[bytes]]:
    """A socket with the keys of a client."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        CLIENT_KEYS.secure(socket)
        socket.connect(address)
        yield socket


def connect(address: str) -> sockets.socket:
    place = urlsplit(address)
    assert place.hostname is not None
    return sockets.create_connection((place.hostname, place.port or 0), timeout=DEADLINE_S)


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


def test_a_message_without_end_does_not_take_memory_without_end() -> None:
    limit, frame, peak = MEMORY_BYTES + SPARE_BYTES, bytes(1 << 20), 0
    with (
        a_server_process() as (server, address),
        a_peer(address) as peer,
        peer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as hung_up,
    ):
        peer.send_multipart([frame] * ((limit + SPARE_BYTES) >> 20), copy=False)
        give_up_s = time.monotonic() + DEADLINE_S
        while not hung_up.poll(5) and time.monotonic() < give_up_s:
            peak = max(peak, peak_bytes(server.pid))
        assert hung_up.poll(0), "the system gives it no more memory: it hangs up, or ends"
    assert MEMORY_BYTES < peak < limit


def test_answers_that_are_not_read_are_not_kept() -> None:
    """Each answer has a megabyte. Without a bound the server would keep them all for this peer."""
    num_asked = 400
    tail = Tail(1, 1, 0, bytes(1 << 20))
    with serving() as address, a_peer(address) as peer:
        peer.send(encode(Push(0, 0, [tail])))
        assert peer.poll(int(1000 * DEADLINE_S))
        peer.recv()
        for number in range(1, num_asked):
            peer.send(encode(Fetch(number, 0, [Known(1, 0, b"", b"")])))
        with a_peer(address) as other:
            for number in range(num_asked):  # the server takes from its peers in turn: then it has handled the fetches
                other.send(encode(Ask(number)))
                assert other.poll(int(1000 * DEADLINE_S))
                other.recv()
        num_answers = 0
        while peer.poll(200):
            assert isinstance(decode(peer.recv()), Fetched)
            num_answers += 1
    assert 0 < num_answers < num_asked / 2, f"of {QUEUED_MESSAGES} and what the system's buffers hold"


class Recorder:
    """A TCP relay to a server that keeps what one client sent."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener = sockets.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = b""
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = connect(self._address)
        self._sockets += [client, server]
        self._threads += [
            threading.Thread(target=self._copy, args=pair) for pair in ((client, server), (server, client))
        ]
        for thread in self._threads[1:]:
            thread.start()

    def _copy(self, source: sockets.socket, target: sockets.socket) -> None:
        is_client = target.getpeername() == connect_name(self._address)
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.sent += data if is_client else b""
                target.sendall(data)
            target.shutdown(sockets.SHUT_WR)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE_S)
        for one in self._sockets:
            one.close()


def connect_name(address: str) -> tuple[str, int]:
    place = urlsplit(address)
    return str(place.hostname), place.port or 0


def test_frames_that_were_recorded_cannot_be_sent_again() -> None:
    with serving() as address:
        recorder = Recorder(address)
        client = DraftClient(ClientConfig(servers=(recorder.address,), keys=CLIENT_KEYS))
        client.observe("g", "a", [1, 2, 3])
        assert client.flush(DEADLINE_S)
        client.drop("g")
        assert client.flush(DEADLINE_S)
        client.close()
        recorder.close()
        assert tokens_held(address) == 0
        with connect(address) as again, contextlib.suppress(OSError):
            again.sendall(recorder.sent)
            again.shutdown(sockets.SHUT_WR)
            while again.recv(65536):
                pass
        assert tokens_held(address) == 0, "the push was taken a second time"
    assert len(recorder.sent) > 500, "the handshake and the messages were recorded"
    assert b"\x01\x00\x00\x00\x02" not in recorder.sent, "they are encrypted"


def tokens_held(address: str) -> int:
    return server_status(address, CLIENT_KEYS, deadline_s=DEADLINE_S).tokens
