# SPDX-License-Identifier: Apache-2.0
"""A call in a daemon thread of its own, so that one that never returns does not keep the program from ending.

Nor does it keep others from running, as it does in asyncio's pool of threads, which has a few for the whole program.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

from seer.errors import SeerError

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
    """`asyncio.to_thread` for code that may hang: the thread is its own, and nothing waits for its end."""
    name = getattr(function, "__qualname__", type(function).__name__)
    answer: T = await in_daemon_thread(name, partial(copy_context().run, function, *arguments, **named))
    return answer


async def in_daemon_thread(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread of this name, and give what it returns or raises; a SystemExit as a SeerError."""
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
        result: Any = None
        error: BaseException | None = None
        try:
            result = function(*arguments)
        except SystemExit as exit:  # it ends a thread, and would end the event loop that awaits it
            error = SeerError(f"SystemExit: {exit}")
        except StopIteration as stop:  # no future takes it
            error = RuntimeError(f"StopIteration: {stop}")
        except BaseException as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await answer
