# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP protocol with limits on what a connection costs before any key is looked at.

A connection waits for                  unblocked by
  a request's head                        its end, `head_s`
  the next request                        its first byte, uvicorn's keep-alive; then the head, as above
  its client's reading                    progress of the reading, `slow_reader_s`

Invariants
  1. Of lines that are no body (the request line, headers, trailers) a connection keeps no more than three times
     `max_head_bytes`: complete ones, one that has not ended, and a piece that is being parsed.
  2. No connection is open for ever: one that runs no request has a timer, and so has one that is not read.
  3. No more than `max_connections` are open; a further one is answered with 503 and closed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from seer.serve.refusals import RETRY_AFTER_S, Refusal, error_body
from seer.serve.settings import Limits

HEADER_COST_BYTES = 32
"""What a header counts beside its text, as in HTTP/2: short ones cost more memory than they have letters."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, limits: Limits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._num_kept_bytes = 0
        """Of the present request's line, headers and trailers."""
        self._num_loose_bytes = 0
        """Received since the parser last had something whole."""
        self._refusal: Refusal | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None

    # Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or answer that there are too many."""
        super().connection_made(transport)
        most = self._limits.max_connections
        if len(self.connections) > most:
            self._refuse(Refusal(503, f"{most:,} connections are open", hint="try again, or raise --max-connections"))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers with the connection."""
        self._end_head_timer()
        self._end_reading_timer()
        super().connection_lost(exc)

    # Heads

    def data_received(self, data: bytes) -> None:
        """Parse in pieces, so that no more than a piece can be held before it is counted."""
        size = self._limits.max_head_bytes
        for start in range(0, len(data), size):
            piece = data if len(data) <= size else data[start : start + size]
            self._num_loose_bytes += len(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                return
            if self._num_loose_bytes > size:
                self._refuse(_too_long(size))
                return
        if self._head_timer is None and not self._is_answering():
            self._await_head()  # bytes have ended uvicorn's wait for the next request

    def on_message_begin(self) -> None:
        """A request begins."""
        self._num_kept_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the address; the parser keeps none of it."""
        self._keep(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._keep(len(name) + len(value) + HEADER_COST_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is here: what follows has limits of its own."""
        self._num_loose_bytes = 0
        self._end_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._num_loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here."""
        self._num_loose_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What the parser, or `_keep` within it, does not take."""
        self._refuse(self._refusal or Refusal(400, msg))

    def _keep(self, num_bytes: int) -> None:
        self._num_loose_bytes = 0
        self._num_kept_bytes += num_bytes
        if self._num_kept_bytes > self._limits.max_head_bytes:
            self._refusal = _too_long(self._limits.max_head_bytes)
            raise self._refusal  # ends the parsing; uvicorn then calls `send_400_response`

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_s, self._give_up_head)

    def _give_up_head(self) -> None:
        if self._num_kept_bytes or self._num_loose_bytes:
            self._refuse(Refusal(408, f"no whole head of a request came within {self._limits.head_s:g} s"))
        else:
            self.transport.close()  # nothing was asked: an answer could be taken for that of a later request

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # Answers

    def pause_writing(self) -> None:
        """The client does not take what is written: give it `slow_reader_s` to go on."""
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        """It goes on."""
        self._end_reading_timer()
        super().resume_writing()

    def _watch_reading(self) -> None:
        num_left = self.transport.get_write_buffer_size()
        self._reading_timer = self.loop.call_later(self._limits.slow_reader_s, self._check_reading, num_left)

    def _check_reading(self, num_left: int) -> None:
        if self.transport.get_write_buffer_size() < num_left:
            self._watch_reading()
        else:
            self.transport.abort()

    def _end_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, refusal: Refusal) -> None:
        """Answer and close; an answer that is being sent is not mixed with this one."""
        if self.transport.is_closing():
            return
        if not self._is_answering():
            self.transport.write(_answer(refusal))
        self.transport.close()


def _too_long(most: int) -> Refusal:
    return Refusal(431, f"the head of the request has more than {most:,} bytes", hint="send fewer or shorter headers")


def _answer(refusal: Refusal) -> bytes:
    body = msgspec.json.encode(error_body(refusal))
    headers = [b"content-type: application/json", b"connection: close", b"content-length: %d" % len(body)]
    if refusal.status == 503:
        headers.append(b"retry-after: %d" % RETRY_AFTER_S)
    return STATUS_LINE[refusal.status] + b"\r\n".join([*headers, b"", body])
