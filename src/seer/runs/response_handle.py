# SPDX-License-Identifier: Apache-2.0
"""One response that a session was asked for: awaitable, and can be cancelled.

Invariant: it is done exactly once, with its response or with the error that broke the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from seer.errors import SeerError
from seer.types import Response, TokenSpan


class ResponseHandle:
    """Made by `Session.submit`. Await it for the response."""

    def __init__(self, group: str | None, on_tokens: TokenSink | None) -> None:
        self.group = group
        self.index = 0
        """Which response of its group it is; known once it is admitted."""
        self.last_instance: int | None = None
        """The instance that computed its newest KV; known once it has ended."""
        self.stop_token: int | None = None
        """The token that ended it, or its turn; known with the last tokens, and None if no token did."""
        self._on_tokens = on_tokens
        self._future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._cancel: Callable[[], None] | None = None
        self._is_cancelled = False

    def __await__(self) -> Generator[Any, None, Response]:
        """The response, however it ended; raises only if the session broke. Stopping to wait does not cancel it."""
        return asyncio.shield(self._future).__await__()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._future.done()

    def on_end(self, call: Callable[[asyncio.Future[Response]], object]) -> None:
        """Call this once it has ended; cheaper than a task that waits."""
        self._future.add_done_callback(call)

    def cancel(self) -> None:
        """End it soon, with the tokens that it has."""
        self._is_cancelled = True
        if self._cancel is not None and not self.done():
            self._cancel()

    # For the session

    def admitted(self, index: int, cancel: Callable[[], None]) -> None:
        """It is a request now, which `cancel` ends."""
        self.index, self._cancel = index, cancel
        if self._is_cancelled:
            cancel()

    def take_tokens(self, span: TokenSpan, stop_token: int | None = None) -> None:
        """Tell the user of new tokens."""
        self.stop_token = stop_token
        if self._on_tokens is not None:
            self._on_tokens(self, span)

    def finish(self, response: Response) -> None:
        """It has ended."""
        self._future.set_result(response)

    def fail(self, error: SeerError) -> None:
        """The session broke before it ended."""
        self._future.set_exception(error)
        self._future.exception()  # so that a handle which is never awaited causes no warning


TokenSink = Callable[[ResponseHandle, TokenSpan], None]
