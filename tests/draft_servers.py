# SPDX-License-Identifier: Apache-2.0
"""A real draft server on loopback, in a thread of the test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from seer.drafting.curve_keys import make_keys
from seer.drafting.server import DraftServer, ServerConfig

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
