# SPDX-License-Identifier: Apache-2.0
"""What SIGINT (Ctrl-C), SIGTERM and SIGHUP do to a command: they end it, and it cleans up as after an error.

Outside an event loop a signal raises `Interrupted` where the command is. A rollout handles signals in its event loop:

    during        the first signal                          the second
    start         ends the start, nothing was generated     has no further effect
    run           cancels the run and keeps what there is   kills the instances and ends the run at once
    cleaning up   has no further effect: every wait there has a deadline

Invariants
  1. The exit code is 128 + the number of the first signal.
  2. No signal ends the process before the instances have ended and their shared memory is freed.
  3. A signal that was ignored when the command started (nohup) stays ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seer.api import Rollout

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code(number: int) -> int:
    """The exit code of a command that a signal ended."""
    return 128 + number


def raise_interrupted(number: int, frame: FrameType | None) -> None:
    """A signal handler: raise `Interrupted` in the main thread."""
    raise Interrupted(number)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Raise `Interrupted` at a signal. Elsewhere than in the main thread signals stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _heeded()}
    for number in before:
        signal.signal(number, raise_interrupted)
    try:
        yield
    finally:
        _restore(before)


class Interruption:
    """The signals that a rollout got while `signals_cancel` was in force."""

    def __init__(self, rollout: Rollout, *, keeps_run: bool) -> None:
        self._rollout = rollout
        self._keeps_run = keeps_run
        task = asyncio.current_task()
        assert task is not None, "signals are handled inside a task"
        self._task = task
        self.number: int | None = None
        """The first signal; None if there was none."""
        self._num_signals = 0
        self._is_ending = False

    def on_signal(self, number: int) -> None:
        """Cancel the run; at the second signal, or if there is no run, end the task."""
        self._num_signals += 1
        self.number = self.number or number
        run = self._rollout.current if self._keeps_run else None
        if self._num_signals == 1 and run is not None and run.loop is not None:
            self._rollout.cancel()
            _say("\nstopping; what was generated is kept (again to stop at once)\n")
        elif not self._is_ending:
            self._is_ending = True
            self._rollout.fleet.kill()
            self._task.cancel()
            _say("\nstopping at once\n")

    def swallow(self) -> bool:
        """For a CancelledError: whether a signal is its cause. The task then goes on."""
        if self._is_ending:
            self._task.uncancel()
        return self._is_ending


@contextlib.contextmanager
def signals_cancel(rollout: Rollout, *, keeps_run: bool = True) -> Iterator[Interruption]:
    """Let signals cancel a rollout in the running event loop; without `keeps_run`, the first one ends all at once."""
    loop = asyncio.get_running_loop()
    interruption = Interruption(rollout, keeps_run=keeps_run)
    before = {number: signal.getsignal(number) for number in _heeded()}
    for number in before:
        loop.add_signal_handler(number, interruption.on_signal, number)
    try:
        yield interruption
    finally:
        for number in before:
            loop.remove_signal_handler(number)
        _restore(before)


def _heeded() -> list[signal.Signals]:
    return [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def _restore(handlers: Mapping[signal.Signals, object]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # None: it was not installed from Python
            signal.signal(number, handler)  # type: ignore[arg-type]


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # after SIGHUP there may be no terminal
        sys.stderr.write(text)
        sys.stderr.flush()
