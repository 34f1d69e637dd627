# SPDX-License-Identifier: Apache-2.0
"""Rewards while the rollout still runs: computed as each response ends.

The reward function may be a coroutine function or a plain one; a plain one runs in a thread of its own. Each call has a
deadline. An error or a missed deadline is written into the response, with the function's name, and generation goes on.

Invariants
  1. In a group that is handed out, every response that ended by itself has a reward or a `reward_error`, exactly one.
  2. No call delays generation. A slow call delays other rewards only while `MAX_CALLS` of them run, and no longer than
     its deadline.

Waits for                                    unblocked by
  a place, then a reward (task)                a reward's end, then its own; one `deadline_s` for both, `close`
  the rewards of a group (`settle`)            theirs, or their deadlines
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from seer.runs.prompts import Prompt
from seer.runs.user_calls import UserCalls, called, name_of, reason
from seer.types import Response

RewardFunction = Callable[[Prompt, Response], Awaitable[float] | float]

MAX_CALLS = 64
"""Rewards computed at once: bounds threads and connections. More wait for a place, within their own deadline."""


class RewardCalls:
    """The reward calls of one run."""

    def __init__(self, function: RewardFunction, calls: UserCalls, *, deadline_s: float) -> None:
        self._function, self._calls = function, calls
        self._name = name_of(function)
        self._deadline_s = deadline_s
        self._places = asyncio.Semaphore(MAX_CALLS)
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}

    def begin(self, prompt: Prompt, response: Response) -> asyncio.Task[None]:
        """Start computing a response's reward; it is written into the response."""
        task = asyncio.create_task(self._reward(prompt, response))
        self._tasks[(response.group, response.index)] = task
        return task

    async def settle(self, responses: tuple[Response, ...]) -> None:
        """Wait until these responses have their reward or the reason why not."""
        keys = [(response.group, response.index) for response in responses]
        await asyncio.gather(*(self._tasks[key] for key in keys if key in self._tasks))
        for key in keys:
            self._tasks.pop(key, None)

    async def close(self) -> None:
        """Wait for no reward any more. Calls that still run are those of `UserCalls` to end."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _reward(self, prompt: Prompt, response: Response) -> None:
        who = f"reward {self._name} of prompt {response.prompt_id}, response {response.index}"
        try:
            response.reward = await self._calls.answer(
                who, lambda: self._call(prompt, response), deadline_s=self._deadline_s, places=self._places
            )
        except Exception as error:  # the user's code may raise anything; generation goes on
            response.reward_error = reason(who, error)

    async def _call(self, prompt: Prompt, response: Response) -> float:
        return float(await called("seer-reward", self._function, prompt, response))
