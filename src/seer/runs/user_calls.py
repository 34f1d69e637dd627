# SPDX-License-Identifier: Apache-2.0
"""Calls of the user's code (environments, rewards, `keep`): none keeps its caller longer than its deadline.

Each is a task of its own, since code may swallow its cancellation (an `except:` in a loop of retries). Such a task is
abandoned: nothing can end it, so nothing waits for it.

Invariants
  1. `answer` returns or raises by its deadline, and at once when its caller is cancelled, whatever the code does. Only
     code that blocks the event loop is beyond it.
  2. A SystemExit is an error of its call, like any other. A KeyboardInterrupt ends the event loop, as anywhere.
  3. A call that was given up is cancelled. If it has not ended `ending_s` later, it is abandoned: counted, and the
     first one named in the log.
  4. After `close` no call is left that anything, `asyncio.run` included, would wait for.

Waits for                                    unblocked by
  an answer (caller)                           the answer, `deadline_s`, the caller's cancellation
  calls that were given up (`close`)           their ends, `ending_s`
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

from seer.errors import DeadlineExceeded, SeerError
from seer.machine.daemon_thread import in_daemon_thread

log = logging.getLogger(__name__)
T = TypeVar("T")

ENDING_S = 5.0
"""A cancelled call may clean up this long: close a connection, end and collect a process."""


class UserCalls:
    """The calls of one run or session."""

    num_abandoned_in_process: ClassVar[int] = 0
    """By all runs and sessions, for metrics: what was abandoned stays when its run has ended."""

    def __init__(self, *, ending_s: float | None = None) -> None:
        self._ending_s = ENDING_S if ending_s is None else ending_s
        self._running: dict[asyncio.Task[Any], str] = {}
        self.num_abandoned = 0
        """Calls that ignored their cancellation. Their tasks stay until the program ends."""

    async def answer(
        self,
        who: str,
        call: Callable[[], Awaitable[T]],
        *,
        deadline_s: float,
        places: asyncio.Semaphore | None = None,
    ) -> T:
        """What the call returns or raises; it may wait for one of `places` first, within its deadline.

        A missed deadline, a SystemExit and a cancellation that is not the caller's are SeerErrors that begin with
        `who`.
        """
        task: asyncio.Task[T] | None = None
        try:
            async with asyncio.timeout(deadline_s) as clock, places or contextlib.nullcontext():
                task = asyncio.create_task(_without_exit(who, call), name=who)
                self._running[task] = who
                task.add_done_callback(self._ended)
                await asyncio.wait([task])
        except TimeoutError:
            assert clock.expired(), "nothing else in there raises it"
            raise DeadlineExceeded(who, deadline_s) from None
        finally:
            if task is not None and not task.done():
                self._give_up(task)
        if task.cancelled():
            raise SeerError(f"{who}: CancelledError, and it had not been cancelled")
        return task.result()

    async def close(self) -> None:
        """Cancel the calls that still run, and abandon those that do not end."""
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=self._ending_s)
        for task in running:
            self._abandon(task)
        if self.num_abandoned > 1:
            log.warning("%d calls ignored their cancellation and were abandoned", self.num_abandoned)

    def _give_up(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        asyncio.get_running_loop().call_later(self._ending_s, self._abandon, task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task, None)
        if not task.cancelled():
            task.exception()  # seen: that of a call that was given up is asked for nowhere else

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        who = self._running.pop(task, None)
        if who is None:
            return  # it has ended
        self.num_abandoned += 1
        UserCalls.num_abandoned_in_process += 1
        if self.num_abandoned == 1:
            log.warning("%s ignored its cancellation for %g s and is abandoned", who, self._ending_s)
        # `asyncio.run` would wait for it. And it must never be freed: that throws GeneratorExit into it, and code that
        # swallows this too would spin where it is freed.
        asyncio.tasks._unregister_task(task)  # noqa: SLF001 - documented for those who end tasks themselves
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def name_of(code: object) -> str:
    """What messages to people call the user's function or object."""
    return getattr(code, "__qualname__", type(code).__name__)


async def called(thread: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the user's function returns: a coroutine function is awaited, a plain one runs in a thread of this name."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    answer = await in_daemon_thread(thread, function, *arguments)
    return await answer if inspect.isawaitable(answer) else answer


def reason(who: str, error: BaseException) -> str:
    """Why a call failed, for people, with the call's name; half a character that the error may hold is replaced."""
    why = str(error) if isinstance(error, SeerError) else f"{type(error).__name__}: {error}"
    return (why if why.startswith(who) else f"{who}: {why}").encode(errors="replace").decode()


async def _without_exit(who: str, call: Callable[[], Awaitable[T]]) -> T:
    """Await a call. A SystemExit would pass through its task and end the event loop."""
    try:
        return await call()
    except SystemExit as exit:
        raise SeerError(f"{who}: SystemExit: {exit}") from None
