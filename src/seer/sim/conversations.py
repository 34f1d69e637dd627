# SPDX-License-Identifier: Apache-2.0
"""Conversations on the production rollout loop: tools as timers, and requests admitted as the way of waiting allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from seer.buffer import Request
from seer.rollout import RolloutLoop
from seer.sim.turns import RequestTurns
from seer.sim.workloads import Workload
from seer.types import Chunk, Group, GroupResult


class Conversations:
    """The tools of one simulated rollout."""

    def __init__(
        self,
        groups: Sequence[Group],
        plan: Sequence[RequestTurns],
        *,
        max_context_tokens: int,
        most_open: int | None = None,
    ) -> None:
        """`plan` has the turns of all requests, group after group. `most_open` are let in at once; None: all."""
        self._plan = plan
        self._most_open = most_open if most_open is not None else len(plan)
        self._left = [
            replace(group, has_turns=True, max_context_tokens=max_context_tokens) for group in reversed(groups)
        ]
        self._loop: RolloutLoop | None = None

    def turn_end(self, chunk: Chunk) -> int:
        """Tokens that the chunk's request has generated at the end of its present turn."""
        return self._plan[chunk.request].end_after(chunk.num_generated_tokens)

    def on_turn(self, request: Request) -> None:
        """A turn has ended: the tool answers later, or ends the response."""
        assert self._loop is not None, "turns end while the loop serves"
        turns, number = self._plan[request.id], request.num_turns - 1
        clock = asyncio.get_running_loop()
        if number == len(turns.given):
            clock.call_later(turns.tool_s[number], self._loop.conclude, request, None)
        else:
            clock.call_later(turns.tool_s[number], self._loop.answer, request, None, turns.given[number])

    async def serve(self, loop: RolloutLoop) -> AsyncIterator[GroupResult]:
        """Roll every group out to its end. Groups are let in as there is room; one at least."""
        self._loop = loop
        self._admit()
        async for complete in loop.serve():
            self._admit()
            yield complete

    def _admit(self) -> None:
        assert self._loop is not None, "set by serve"
        buffer = self._loop.buffer
        while self._left:
            num_open = buffer.num_admitted - buffer.num_ended
            if num_open and num_open + self._left[-1].num_requests > self._most_open:
                return
            self._loop.admit([self._left.pop()])
        self._loop.seal()


def num_that_fit(workload: Workload) -> int:
    """Requests whose KV fits at their mean final length, over all instances."""
    total = sum(workload.prompt_tokens + one.num_generated + sum(one.given) for one in workload.turns)
    return max(1, workload.limits().kv_tokens * len(workload.turns) // total) * workload.num_instances
