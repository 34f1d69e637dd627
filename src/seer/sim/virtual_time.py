# SPDX-License-Identifier: Apache-2.0
"""An asyncio event loop whose clock is virtual: it jumps to the next event instead of waiting for it.

The production rollout loop runs on it unchanged, so a simulated iteration of hours takes seconds. There is no I/O:
`AbstractEventLoop` raises for sockets, subprocesses, threads and signals.

Invariants
  1. Time never runs backwards and moves only when nothing is ready to run.
  2. Callbacks due at the same time run in the order they were scheduled: equal programs give equal runs.
  3. If nothing is ready or scheduled while the main coroutine is unfinished, an error reports the deadlock.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import sys
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VirtualHandle(asyncio.TimerHandle):
    """A scheduled callback. Without asyncio's support for debugging and implicit contexts: a simulation makes several
    of these for every chunk.
    """

    __slots__ = ()

    def __init__(  # does not call super's, which is slower
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualTimeLoop,
        context: contextvars.Context | None,
        when_s: float = 0.0,
    ) -> None:
        self._callback: Callable[..., object] = callback
        self._args = args
        self._loop = loop
        self._context = context
        self._when = when_s
        self._cancelled = False

    def cancel(self) -> None:
        """Never run it. It is dropped when its time comes."""
        self._cancelled = True

    def _run(self) -> None:
        try:
            if self._context is None:
                self._callback(*self._args)
            else:
                self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._loop.call_exception_handler({"message": f"in {self._callback}", "exception": error})


class VirtualTimeLoop(asyncio.AbstractEventLoop):
    """A deterministic, single-threaded loop in virtual time. Use `run`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._time_s = start_s
        self._sequence = 0
        self._ready: deque[VirtualHandle] = deque()
        self._scheduled: list[tuple[float, int, VirtualHandle]] = []
        self._running = False
        self._stopping = False
        self._closed = False
        self._generators: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()
        self._failure: BaseException | None = None

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._time_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run the callback at the present time, after those that are already ready."""
        handle = VirtualHandle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run the callback at a virtual time; a time in the past means now."""
        when = max(when, self._time_s)
        self._sequence += 1
        handle = VirtualHandle(callback, args, self, context, when)
        heapq.heappush(self._scheduled, (when, self._sequence, handle))
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run the callback after `delay` virtual seconds."""
        return self.call_at(self._time_s + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Schedule a coroutine."""
        return asyncio.Task(coro, loop=self, **kwargs)

    def run_until_complete(self, future: Any) -> Any:
        """Run until the awaitable is done and return its result."""
        task = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(lambda _: self.stop())
        self.run_forever()
        if not task.done():
            raise RuntimeError(f"deadlock in virtual time at {self._time_s:.3f} s: nothing is scheduled, {task} waits")
        return task.result()

    def run_forever(self) -> None:
        """Run until `stop`, or until nothing is left to do."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._generators.add)
        asyncio._set_running_loop(self)
        self._running, self._stopping = True, False
        try:
            while not self._stopping and self._advance():
                for _ in range(len(self._ready)):
                    handle = self._ready.popleft()
                    if not handle._cancelled:
                        handle._run()
                if self._failure is not None:
                    raise self._failure
        finally:
            self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _advance(self) -> bool:
        """Make ready what is due; jump in time if nothing is ready. False if nothing is left."""
        scheduled = self._scheduled
        while scheduled and scheduled[0][2]._cancelled:
            heapq.heappop(scheduled)
        if not self._ready:
            if not scheduled:
                return False
            self._time_s = scheduled[0][0]
        while scheduled and scheduled[0][0] <= self._time_s:
            self._ready.append(heapq.heappop(scheduled)[2])
        return True

    def stop(self) -> None:
        """Return from `run_forever` after the callbacks that are ready."""
        self._stopping = True

    def close(self) -> None:
        """Drop everything scheduled."""
        self._closed = True
        self._ready.clear()
        self._scheduled.clear()

    def is_running(self) -> bool:
        """Whether `run_forever` is active."""
        return self._running

    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def get_debug(self) -> bool:
        """There is no debug mode."""
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when their time comes."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the run with an exception that no task awaits: a simulation does not go on after a bug."""
        failure = context.get("exception")
        self._failure = failure if failure is not None else RuntimeError(str(context.get("message")))

    async def shutdown_asyncgens(self) -> None:
        """Close generators that were left unfinished."""
        for generator in list(self._generators):
            await generator.aclose()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    loop = VirtualTimeLoop()  # type: ignore[abstract]  # the missing methods are for I/O
    try:
        result: T = loop.run_until_complete(coroutine)
        loop.run_until_complete(loop.shutdown_asyncgens())
        return result
    finally:
        loop.close()
