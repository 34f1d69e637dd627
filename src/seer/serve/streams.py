# SPDX-License-Identifier: Apache-2.0
"""Answers that take time: they end when their client goes away, and streams have a limit for slow readers.

Waits for                               unblocked by
  the work of a plain answer              its end, the client's leaving
  a stream's next event                   the generation, the client's leaving
  room to send                            the client's reading, its leaving, `slow_reader_s`
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from seer.serve.bodies import ClientGone
from seer.serve.refusals import error_body, refusal_of

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work; if the client leaves first, cancel it and raise ClientGone."""
    task, has_left = asyncio.current_task(), False
    assert task is not None, "called from a coroutine"

    def leave(gone: asyncio.Future[None]) -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    gone = asyncio.ensure_future(_disconnected(request.receive))
    gone.add_done_callback(leave)
    try:
        return await work  # in this task: one of its own would cost more than a small request
    except asyncio.CancelledError:
        if not has_left or task.uncancel():
            raise  # the server ends
        raise ClientGone from None
    finally:
        gone.remove_done_callback(leave)
        gone.cancel()


class EventStream(Response):
    """Server-sent events. `on_close` is called once, however the stream ends."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], object],
        slow_reader_s: float,
        ends_with: bytes = DONE,
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close
        self._slow_reader_s = slow_reader_s
        self._ends_with = ends_with

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves."""
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (sending, gone):
                one.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            self._on_close()
            await self._events.aclose()
        # A stream that was not read is left without its end, and uvicorn closes the connection.

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await self._send(send, event)
            if self._ends_with:
                await self._send(send, self._ends_with)
        except TimeoutError:
            raise
        except Exception as error:  # the status is sent: the error is an event
            with contextlib.suppress(TimeoutError):
                await self._send(send, event_of(error_body(refusal_of(error))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        async with asyncio.timeout(self._slow_reader_s):
            await send({"type": "http.response.body", "body": body, "more_body": True})


def event_of(value: object) -> bytes:
    """A server-sent event with a JSON value."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
