# SPDX-License-Identifier: Apache-2.0
"""A call in a daemon thread of its own, so that one that never returns does not keep the program from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


async def in_daemon_thread(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread of this name, and give what it returns or raises."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def work() -> None:
        try:
            result, error = function(*arguments), None
        except Exception as failure:
            result, error = None, failure
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await answer
