# SPDX-License-Identifier: Apache-2.0
"""A server process: the rollout with its session, uvicorn around it, and its end.

    the first SIGTERM, SIGINT or SIGHUP   no new requests; those in flight end, for at most `drain_s`
    the second                            those in flight are cancelled

Waits for                             unblocked by
  a signal                              a signal, the session's failure
  the requests in flight                their ends, `drain_s`, the second signal
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from seer.errors import ConfigError
from seer.serve.app import make_app
from seer.serve.service import Service
from seer.serve.settings import ServeSettings

log = logging.getLogger(__name__)
BACKLOG = 4096
CANCELLED_S = 10.0
"""For clients to take what was cancelled."""
FAILURE_CHECK_S = 1.0
"""A server without instances ends within this time, so that whatever started it can start it again."""
KEEP_ALIVE_S = 30
"""Longer than the connections of trainers stay unused within a rollout."""


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves signals alone and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield


def bind(settings: ServeSettings) -> socket.socket:
    """The listening socket; bound before instances start, so that a port in use is found at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host, settings.port))
    except OSError as error:
        made.close()
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}",
            hint="another --port, or --port 0 for any free one",
        ) from None
    return made


async def serve(service: Service, listener: socket.socket, *, on_ready: Callable[[str], None]) -> int:
    """Serve until a signal asks to stop, and return that signal; raises what broke the session."""
    config = uvicorn.Config(
        make_app(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
        ws="none",
    )
    server, stop = _Uvicorn(config), _Stop()
    with _signals(stop):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await server.listens.wait()
            on_ready(url_of(listener))
            await _until_stopped(service, stop)
            await _drain(service, stop)
        finally:
            server.should_exit = server.force_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            service.group.close()
    assert stop.number is not None, "it ends by a signal"
    return stop.number


def url_of(listener: socket.socket) -> str:
    """Where the server can be reached from this machine."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _until_stopped(service: Service, stop: _Stop) -> None:
    """Wait for a signal; raise the session's failure."""
    while not stop.is_set:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAILURE_CHECK_S):
                await stop.wait()
        if service.backend.session.failure is not None:
            raise service.backend.session.failure


async def _drain(service: Service, stop: _Stop) -> None:
    """Let what is in flight end; cancel it at the deadline or at the second signal."""
    service.gate.drain()
    await service.lifecycle.thaw()
    idle = asyncio.create_task(service.gate.until_idle())
    hurry = asyncio.create_task(stop.wait_again())
    try:
        await asyncio.wait((idle, hurry), timeout=service.settings.limits.drain_s, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            log.warning("%d responses are cancelled", service.cancel_all())
            await asyncio.wait((idle,), timeout=CANCELLED_S)
    finally:
        for task in (idle, hurry):
            task.cancel()
        await asyncio.gather(idle, hurry, return_exceptions=True)


class _Stop:
    """The signals that a server got."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._first, self._second = asyncio.Event(), asyncio.Event()

    def on_signal(self, number: int) -> None:
        (self._second if self._first.is_set() else self._first).set()
        self.number = self.number or number

    @property
    def is_set(self) -> bool:
        return self._first.is_set()

    async def wait(self) -> None:
        await self._first.wait()

    async def wait_again(self) -> None:
        await self._second.wait()


@contextlib.contextmanager
def _signals(stop: _Stop) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, stop.on_signal, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
