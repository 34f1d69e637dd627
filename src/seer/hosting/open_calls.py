# SPDX-License-Identifier: Apache-2.0
"""Calls to an instance's process that wait for their answers.

Invariant: a call ends once, with the process's answer or with the error of `fail`, unless it is forgotten before.
"""

from __future__ import annotations

import asyncio

from seer.errors import InstanceError
from seer.hosting.messages import CallResult, revive_error


class OpenCalls:
    """Calls by number; a number is never used again."""

    def __init__(self) -> None:
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._num_calls = 0

    def open(self) -> tuple[int, asyncio.Future[None]]:
        """The number of a new call, and its answer."""
        self._num_calls += 1
        answer = self._answers[self._num_calls] = asyncio.get_running_loop().create_future()
        return self._num_calls, answer

    def forget(self, number: int) -> None:
        """Nobody waits for this answer any more."""
        self._answers.pop(number, None)

    def settle(self, instance: int, result: CallResult) -> None:
        """The process has answered. The answer to a call that has ended already is ignored."""
        answer = self._answers.pop(result.number, None)
        if answer is None or answer.done():
            return
        if result.error is None:
            answer.set_result(None)
        else:
            answer.set_exception(revive_error(f"instance {instance}: {result.error}", result.kind, result.hint))

    def fail(self, why: str) -> None:
        """No answer comes to the calls that are open."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(InstanceError(why))
        self._answers.clear()
