# SPDX-License-Identifier: Apache-2.0
"""Calls into a library that may block for a minute, with a deadline for the caller.

Each call runs on a daemon thread and is waited for until its deadline. After a call that timed out, or one
the library reported as unreachable, the breaker opens: for a while every call fails at once, then calls are made
again.

Invariants
  1. `call` returns or raises within its deadline; the library's own time-outs do not matter.
  2. Memory a timed-out call was using stays its own until it returns: only then is `when_late` called.
  3. A process can end while a call hangs: the threads are daemons.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from seer.errors import DeadlineExceeded, PoolError

T = TypeVar("T")


class Breaker:
    """Open for `retry_s` after a failure."""

    def __init__(self, retry_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._retry_s = retry_s
        self._clock = clock
        self._closed_again_at = 0.0
        self.num_opened = 0
        """Times it opened."""

    @property
    def open(self) -> bool:
        """True while calls must not be made."""
        return self._clock() < self._closed_again_at

    def trip(self) -> None:
        """A call failed: make none for a while."""
        self.num_opened += 1
        self._closed_again_at = self._clock() + self._retry_s


class BoundedCalls:
    """A few daemon threads that make calls; while `breaker` is open none are made."""

    def __init__(self, name: str, num_threads: int, deadline_s: float, retry_s: float) -> None:
        self.deadline_s = deadline_s
        self.breaker = Breaker(retry_s)
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        for i in range(num_threads):
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True).start()

    def call(
        self,
        work: Callable[[], T],
        *,
        what: str,
        deadline_s: float | None = None,
        when_late: Callable[[], None] | None = None,
    ) -> T:
        """Run `work`; PoolError when the breaker is open, DeadlineExceeded when it takes too long.

        `when_late` runs once, when a call that took too long has ended.
        """
        if self.breaker.open:
            raise PoolError(f"{what}: the pool failed a moment ago and is not asked again yet")
        limit = self.deadline_s if deadline_s is None else deadline_s
        future: Future[T] = Future()
        self._work.put((future, work))
        try:
            return future.result(limit)
        except TimeoutError:
            self.breaker.trip()
            if when_late is not None:
                future.add_done_callback(lambda _: when_late())
            future.cancel()  # if it has not begun, it never will
            raise DeadlineExceeded(what, limit) from None

    def start(self, work: Callable[[], Any]) -> None:
        """Run `work` in the background; its result is dropped."""
        if not self.breaker.open:
            self._work.put((Future(), work))

    def close(self) -> None:
        """Let the threads end when they are free; does not wait."""
        for _ in range(self._num_threads):
            self._work.put(None)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # any error goes to the caller
                future.set_exception(error)
