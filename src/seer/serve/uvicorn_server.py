# SPDX-License-Identifier: Apache-2.0
"""uvicorn as Seer uses it: a socket that is bound early, no signals of its own, and word of when it listens."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import importlib.util
import resource
import socket
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import uvicorn

from seer.errors import ConfigError
from seer.machine.descriptors import allow_descriptors
from seer.serve.bounded_protocol import BoundedProtocol
from seer.serve.settings import Limits, ServeSettings

T = TypeVar("T")
BACKLOG = 4096
KEEP_ALIVE_S = 30
"""Longer than the connections of trainers stay unused within a rollout."""


def run_on_fast_loop(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on uvloop where it is installed: it writes what one turn of the loop sends at once."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(work)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class QuietServer(uvicorn.Server):
    """uvicorn that bounds its connections, leaves signals alone and says when it listens."""

    def __init__(self, app: Any, limits: Limits) -> None:
        http: Any = functools.partial(BoundedProtocol, _within_descriptors(limits))  # called as the class would be
        super().__init__(
            uvicorn.Config(
                app,
                http=http,
                log_config=None,
                access_log=False,
                lifespan="off",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                server_header=False,
                ws="none",
            )
        )
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield


def _within_descriptors(limits: Limits) -> Limits:
    """No more connections than half of what the system lets this process have open: instances and files need some."""
    allowed = allow_descriptors()
    if allowed == resource.RLIM_INFINITY:
        return limits
    return replace(limits, max_connections=max(1, min(limits.max_connections, allowed // 2)))


def bind(settings: ServeSettings) -> socket.socket:
    """The listening socket; bound before instances start, so that a port in use is found at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host, settings.port))
    except OSError as error:
        made.close()
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}",
            hint="another --port, or --port 0 for any free one" if is_port else "--host is an address of this machine",
        ) from None
    return made


def url_of(listener: socket.socket) -> str:
    """Where the server can be reached from this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
