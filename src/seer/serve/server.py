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
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

from seer.serve.app import make_app
from seer.serve.service import Service
from seer.serve.uvicorn_server import QuietServer, url_of

log = logging.getLogger(__name__)
CANCELLED_S = 10.0
"""For responses that were cancelled to end."""
ANSWERED_S = 10.0
"""For clients to take the last of their answers."""
FAILURE_CHECK_S = 1.0
"""A server without instances ends within this time, so that whatever started it can start it again."""


async def serve(service: Service, listener: socket.socket, *, on_ready: Callable[[str], None]) -> int:
    """Serve until a signal asks to stop, and return that signal; raises what broke the session."""
    server, stop = QuietServer(make_app(service), service.settings.limits), _Stop()
    with _signals(stop):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await server.listens.wait()
            gc.collect()
            gc.freeze()  # modules and the model's tokenizer: walking them again and again would delay requests
            on_ready(url_of(listener))
            await _until_stopped(service, stop)
            await _drain(service, stop)
            server.should_exit = True  # uvicorn lets answers that are being sent end
            await asyncio.wait((serving,), timeout=ANSWERED_S)
        finally:
            server.should_exit = server.force_exit = True
            await asyncio.gather(serving, return_exceptions=True)
    assert stop.number is not None, "it ends by a signal"
    return stop.number


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
    service.backend.live.close()
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
