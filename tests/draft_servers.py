# SPDX-License-Identifier: Apache-2.0
"""A real draft server on loopback, in a thread of the test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import zmq

from seer.drafting.curve_keys import ClientKeys, make_keys
from seer.drafting.server import DraftServer, ServerConfig
from seer.drafting.wire import Ask, Status, decode, encode

DEADLINE_S = 20.0
ANY_PORT = "tcp://127.0.0.1:*"
SERVER_KEYS, CLIENT_KEYS = make_keys()


@contextlib.contextmanager
def serving(address: str = ANY_PORT, **settings: object) -> Iterator[str]:
    """Its address, until the block ends."""
    server = DraftServer(ServerConfig(address=address, **{"keys": SERVER_KEYS} | settings))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.address
    finally:
        server.stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the server did not stop"


def server_status(
    address: str,
    keys: ClientKeys,
    is_wanted: Callable[[Status], bool] = lambda status: True,
    deadline_s: float = 60.0,
) -> Status:
    """Ask until the status is as wanted: instances ship and drop tokens in the background."""
    give_up_s = time.monotonic() + deadline_s
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        keys.secure(socket)
        socket.connect(address)
        while True:
            socket.send(encode(Ask(1)))
            assert socket.poll(int(deadline_s * 1000)), "the draft server did not answer"
            status = decode(socket.recv())
            assert isinstance(status, Status)
            if is_wanted(status) or time.monotonic() > give_up_s:
                return status
