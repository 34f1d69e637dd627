# SPDX-License-Identifier: Apache-2.0
"""Simulate conversations: responses in turns, with tools that take time, on the production rollout loop.

A workload's lengths are split into turns, and after each turn but the last a tool gives tokens after a while. Three
ways to treat the KV of a request that waits for its tool:

    park        it rests in the pool; the request holds nothing on its instance
    recompute   there is no pool: it is computed again, unless it still rests on the instance
    hold        it stays on the instance: a request keeps its place from its start to its end, so only as many are
                admitted as have room there at their mean length

Invariant: all ways have the same turns, given tokens and tool times.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from seer.buffer import Request
from seer.context import Context
from seer.metrics.summary import Summarizer, Summary
from seer.placement import PlacementConfig
from seer.rollout import RolloutLoop
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.sim import virtual_time
from seer.sim.instance import SimulatedInstance
from seer.sim.workloads import Workload
from seer.transfer import TransferEstimate
from seer.types import Chunk, Group

Way = Literal["park", "recompute", "hold"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnModel:
    """How responses are split into turns. Numbers are drawn evenly from their ranges."""

    turns: tuple[int, int] = (2, 8)
    given_tokens: tuple[int, int] = (64, 1024)
    tool_s: tuple[float, float] = (0.2, 5.0)


@dataclass(frozen=True, slots=True)
class RequestTurns:
    """The turns of one request."""

    ends: tuple[int, ...]
    """Tokens it has generated at the end of each turn."""
    given: tuple[int, ...]
    """Tokens that the tool gives after each turn but the last."""
    tool_s: tuple[float, ...]
    """What each call takes."""

    def end_after(self, num_generated: int) -> int:
        """The end of the turn in which this many tokens are the start or the middle."""
        return next(end for end in self.ends if end > num_generated)


def plan_turns(workload: Workload, model: TurnModel, seed: int = 0) -> list[RequestTurns]:
    """Turns of every request, in order of admission."""
    dice = random.Random(seed)
    return [_split(length, model, dice) for row in workload.lengths for length in row]


def simulate_turns(workload: Workload, plan: Sequence[RequestTurns], way: Way, *, scheduler: str = "seer") -> Summary:
    """Roll the workload out to the end."""
    simulation = _Simulation(workload, plan, way, scheduler)
    virtual_time.run(simulation.run())
    return simulation.summarizer.summary()


class _Simulation:
    def __init__(self, workload: Workload, plan: Sequence[RequestTurns], way: Way, scheduler: str) -> None:
        self._plan, self._workload = plan, workload
        self.summarizer = Summarizer(workload.num_instances)
        most_given = max(sum(one.given) for one in plan)
        self._max_context = workload.prompt_tokens + workload.max_tokens + most_given
        self._limits = replace(workload.limits(), max_model_len=self._max_context + 1)
        context = Context()
        transfer = TransferEstimate(workload.cost.transfer_costs()) if way == "park" else None
        settings = SchedulerSettings(chunk_tokens=workload.chunk_tokens, placement=PlacementConfig(transfer=transfer))
        chosen = make_scheduler(
            parse_scheduler(scheduler), settings, context, lambda request: plan[request.id].ends[-1]
        )
        self._instances = [self._instance(id) for id in range(workload.num_instances)]
        self._loop = RolloutLoop(self._instances, chosen, context, events=self.summarizer, on_turn=self._on_turn)
        self._left = [self._with_turns(group) for group in workload.groups()][::-1]
        self._most_open = self._room() if way == "hold" else workload.num_requests

    def _instance(self, id: int) -> SimulatedInstance:
        return SimulatedInstance(
            id,
            self._workload.cost,
            self._limits,
            lambda request: self._plan[request].ends[-1],
            events=self.summarizer,
            turn_end=self._turn_end,
        )

    def _turn_end(self, chunk: Chunk) -> int:
        return self._plan[chunk.request].end_after(chunk.num_generated_tokens)

    def _with_turns(self, group: Group) -> Group:
        return replace(group, has_turns=True, max_context_tokens=self._max_context)

    def _room(self) -> int:
        """Requests whose KV fits at their mean final length, over all instances."""
        total = sum(self._workload.prompt_tokens + one.ends[-1] + sum(one.given) for one in self._plan)
        return max(1, self._limits.kv_tokens * len(self._plan) // total) * self._workload.num_instances

    async def run(self) -> None:
        for instance in self._instances:
            await instance.start(self._loop.on_output)
        self._admit()
        async for _ in self._loop.serve():
            self._admit()
        for instance in self._instances:
            await instance.close()

    def _admit(self) -> None:
        """Let groups in while there is room for them; one at least."""
        buffer = self._loop.buffer
        while self._left:
            num_open = buffer.num_admitted - buffer.num_ended
            if num_open and num_open + self._left[-1].num_requests > self._most_open:
                return
            self._loop.admit([self._left.pop()])
        self._loop.seal()

    def _on_turn(self, request: Request) -> None:
        turns, number = self._plan[request.id], request.num_turns - 1
        clock = asyncio.get_running_loop()
        if number == len(turns.given):
            clock.call_later(turns.tool_s[number], self._loop.conclude, request, None)
        else:
            clock.call_later(turns.tool_s[number], self._loop.answer, request, None, turns.given[number])


def _split(length: int, model: TurnModel, dice: random.Random) -> RequestTurns:
    count = min(length, dice.randint(*model.turns))
    ends = (*sorted(dice.sample(range(1, length), count - 1)), length)
    given = tuple(dice.randint(*model.given_tokens) for _ in range(count - 1))
    return RequestTurns(ends, given, tuple(dice.uniform(*model.tool_s) for _ in range(count)))
