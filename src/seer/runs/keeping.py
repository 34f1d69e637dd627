# SPDX-License-Identifier: Apache-2.0
"""Asks the user's `keep` whether a group that is whole is wanted.

`keep` may be a coroutine function or a plain one. A plain one runs in a thread, so that it holds up neither generation
nor its own deadline, and one call at a time, so that it may count what it has seen.

Waits for                                    unblocked by
  an answer                                    the answer, `deadline_s`, the caller's cancellation
  the call before (of a plain function)        its answer or its deadline, which ends the run
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable

from seer.errors import InputError
from seer.runs.user_calls import UserCalls, called, name_of
from seer.types import GroupResult

KeepFunction = Callable[[GroupResult], Awaitable[bool] | bool]
"""Whether a group that is whole, with its rewards, is wanted."""


class KeepCalls:
    """The calls of one run's `keep`."""

    def __init__(self, function: KeepFunction, calls: UserCalls, *, deadline_s: float) -> None:
        self._function, self._calls, self._deadline_s = function, calls, deadline_s
        self._name = name_of(function)
        self._turn = contextlib.nullcontext() if inspect.iscoroutinefunction(function) else asyncio.Lock()

    async def wants(self, group: GroupResult) -> bool:
        """Whether the group is kept; raises what the function raises, and `DeadlineExceeded`."""
        who = f"keep {self._name} of prompt {group.prompt_id}"
        async with self._turn:
            return await self._calls.answer(who, lambda: self._call(group), deadline_s=self._deadline_s)

    async def _call(self, group: GroupResult) -> bool:
        answer = await called("seer-keep", self._function, group)
        if answer is None:  # a forgotten `return` would drop every group, for ever where prompts have no end
            raise InputError(f"keep {self._name} answered None", hint="return True or False")
        return bool(answer)
