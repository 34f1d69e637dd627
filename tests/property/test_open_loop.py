# SPDX-License-Identifier: Apache-2.0
"""A loop that stays open: groups at any time, cancellations, instances of unlike size that join, retire and are lost.

At every event the books of buffer and fleet are checked. In the end every request has ended exactly once, with all of
its tokens unless it was cancelled, and nothing is remembered of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_cost, a_group
from seer.buffer import Request
from seer.context import Context
from seer.metrics.events import Ended, Event
from seer.rollout import RolloutLoop
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.sim import virtual_time
from seer.sim.instance import SimulatedInstance
from seer.types import ChunkOutput, Group, InstanceLimits

MAX_TOKENS = 400
BIG = InstanceLimits(kv_blocks=40, block_size=16, max_num_seqs=8, max_model_len=640)
SMALL = InstanceLimits(kv_blocks=16, block_size=16, max_num_seqs=3, max_model_len=250)


class OpenLoop:
    """A program of random operations on a loop that runs in virtual time."""

    def __init__(self, scheduler: str, seed: int) -> None:
        self.dice = Random(seed)
        self.lengths: dict[int, int] = {}
        self.ended: Counter[int] = Counter()
        self.tokens: Counter[int] = Counter()
        self.cancelled: dict[int, int] = {}  # request -> its chunks when it was cancelled
        self.requests: list[Request] = []
        self.groups: list[Group] = []
        self.live = [0]
        self.loop: RolloutLoop
        self.scheduler = scheduler

    async def run(self) -> None:
        context = Context()
        chosen = make_scheduler(
            parse_scheduler(self.scheduler), SchedulerSettings(chunk_tokens=96), context, lambda request: 1
        )
        self.loop = RolloutLoop([self.an_instance(0, BIG)], chosen, context, events=self.note, on_tokens=self.count)
        await self.loop.instances[0].start(self.loop.on_output)
        work = asyncio.create_task(self.serve())
        for _ in range(40):
            await asyncio.sleep(self.dice.random() * 2.0)
            await self.dice.choice([self.admit, self.admit, self.admit, self.cancel, self.join, self.leave])()
            self.loop.buffer.check()
            self.loop.fleet.check()
        self.loop.seal()
        await work

    async def serve(self) -> None:
        async for _ in self.loop.serve():
            pass

    def an_instance(self, id: int, limits: InstanceLimits) -> SimulatedInstance:
        return SimulatedInstance(id, a_cost(limits.kv_tokens), limits, self.lengths.__getitem__, events=self.note)

    def note(self, event: Event) -> None:
        if isinstance(event, Ended):
            self.ended[event.request] += 1

    def count(self, request: Request, output: ChunkOutput) -> None:
        self.tokens[request.id] += output.num_tokens
        assert request.num_tokens <= self.loop.fleet.limits[output.instance].max_model_len

    async def admit(self) -> None:
        prompt, size = self.dice.randrange(1, 200), self.dice.randrange(1, 5)
        group = a_group(len(self.groups), size, prompt=prompt, max_tokens=MAX_TOKENS)
        for i in range(size):
            self.lengths[len(self.requests) + i] = self.dice.randrange(1, MAX_TOKENS + 1)
        self.groups.append(group)
        self.requests += self.loop.admit([group])

    async def cancel(self) -> None:
        if self.requests:
            request = self.dice.choice(self.requests)
            if not request.ended:
                self.cancelled.setdefault(request.id, request.num_chunks)
            self.loop.cancel_request(request)

    async def join(self) -> None:
        instance = self.an_instance(len(self.loop.instances), self.dice.choice([BIG, SMALL]))
        await instance.start(self.loop.on_output)
        self.loop.add_instance(instance)
        self.live.append(instance.id)

    async def leave(self) -> None:
        """Retire an instance, or lose it, reported twice. The first one stays, for what fits nowhere else."""
        if len(self.live) > 1:
            gone = self.live.pop(self.dice.randrange(1, len(self.live)))
            if self.dice.random() < 0.5:
                self.loop.retire_instance(gone)
            if self.dice.random() < 0.5:
                self.loop.lose_instance(gone)
                self.loop.lose_instance(gone)
                await self.loop.instances[gone].close()


@settings(max_examples=80)
@given(scheduler=st.sampled_from(["seer", "context", "divided", "verl"]), seed=st.integers(0, 2**32))
def test_whatever_comes_and_goes_every_request_ends_once_with_its_tokens(scheduler: str, seed: int) -> None:
    program = OpenLoop(scheduler, seed)
    virtual_time.run(program.run())
    for request in program.requests:
        assert program.ended[request.id] == 1
        assert program.tokens[request.id] == request.num_generated
        assert request.response is not None
        assert request.num_chunks == program.cancelled.get(request.id, request.num_chunks)
        if request.response.is_complete:
            assert request.num_generated == program.lengths[request.id]
        else:
            assert request.id in program.cancelled
    for group in program.groups:
        program.loop.forget(group)
        program.loop.forget_family(group.family)
        program.loop.fleet.forget(group.same_prompt_as)
    assert not list(program.loop.buffer.requests())
    assert not program.loop.fleet._prompt_home
    assert not program.loop.context._longest_finished
    assert not program.loop._cancelled
