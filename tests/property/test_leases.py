# SPDX-License-Identifier: Apache-2.0
"""Leases under random finish orders, memory, parking and loss of instances: rules 1 and 2 of the design hold.

`roll_out` checks at every event that requests and promises are counted right, that a request has a lease exactly while
it is in flight, and that no instance is promised more than it has.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout_rules import (  # type: ignore[import-not-found]  # of this folder
    assert_nothing_was_lost,
    disturbance,
    faults,
    num_preemptions,
    workloads,
)

from builders import a_workload, roll_out
from meddling import Meddling
from seer.buffer import request_seed
from seer.context import Context
from seer.engine.base import Instance
from seer.metrics.events import Event, Extended, Started, Stopped
from seer.placement import PlacementConfig
from seer.rollout import RolloutLoop
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.sim.instance import SimulatedInstance
from seer.sim.workloads import Workload
from seer.types import Group, Sampling

LEASING = ("seer", "seer-oracle")


@settings(max_examples=60)
@given(
    workload=workloads(),
    scheduler=st.sampled_from(LEASING),
    schedule=st.one_of(st.just([]), faults()),
    seed=st.integers(0, 1000),
)
def test_random_parking_and_loss_lose_nothing_and_never_preempt(
    workload: Workload, scheduler: str, schedule: list[tuple[float, float, int]], seed: int
) -> None:
    def disturb(loop: RolloutLoop, instances: list[SimulatedInstance], fresh: object) -> None:
        loop.scheduler = Meddling(loop, seed)
        disturbance(schedule)(loop, instances, fresh)

    run = roll_out(workload, scheduler, disturb=disturb)
    assert_nothing_was_lost(run)
    assert num_preemptions(run) == 0


def test_most_requests_stay_for_more_than_one_lease() -> None:
    """The test above means something: leases are extended, and requests are parked for memory."""
    lengths = [[300, 280, 310, 290], [40, 600, 320, 30], [500, 450, 300, 80]]
    run = roll_out(a_workload(lengths, instances=2, kv_tokens=1280, chunk_tokens=300), "seer", drafts=False)
    num = {kind: sum(isinstance(event, kind) for event in run.events) for kind in (Extended, Started)}
    assert num[Extended] > num[Started]
    assert any(isinstance(event, Stopped) and event.reason == "parked" for event in run.events)


# The embedded engine

PROMPTS = [[11, 45, 3, 99, 27, 64, 80, 5, 31, 77], [12, 19, 101, 8], [7] * 21]
MAX_TOKENS, PER_GROUP = 150, 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scheduler", ["seer", "verl"])
def test_disturbed_runs_have_the_tokens_of_an_undisturbed_one(tmp_path: Path, seed: int, scheduler: str) -> None:
    torch = pytest.importorskip("torch")
    from engines import a_chunk, an_engine, generate
    from pools import a_local_pool
    from seer.engine.local import LocalInstance
    from seer.engine.local.cache import block_bytes
    from seer.engine.local.model_config import read_config
    from seer.engine.local.tiny import make_tiny_model
    from seer.transfer import TransferEstimate

    folder = make_tiny_model(tmp_path / "tiny", seed=5)
    dice = random.Random(seed)
    sampling = Sampling(max_tokens=MAX_TOKENS)
    groups = [
        Group(id=i, num_requests=PER_GROUP, num_prompt_tokens=len(ids), sampling=sampling, prompt=ids, seed=i)
        for i, ids in enumerate(PROMPTS)
    ]
    chunks = [
        a_chunk(
            PER_GROUP * g + i,
            ids,
            seed=request_seed(g, i),
            max_tokens=MAX_TOKENS,
            ignore_eos=False,
        )
        for g, ids in enumerate(PROMPTS)
        for i in range(PER_GROUP)
    ]
    whole = generate(an_engine(folder, block_size=8, kv_blocks=512, max_num_seqs=12), chunks)
    events: list[Event] = []

    async def rollout(pool: object) -> dict[int, list[int]]:
        instances = [
            LocalInstance(i, folder, kv_blocks=45, block_size=8, max_num_seqs=6, stream_tokens=4, pool=pool)  # type: ignore[arg-type]
            for i in range(2)
        ]
        context = Context()
        settings = SchedulerSettings(
            chunk_tokens=64, placement=PlacementConfig(transfer=TransferEstimate()), whole_blocks=True
        )
        chosen = make_scheduler(parse_scheduler(scheduler), settings, context, lambda request: 1)

        def note(event: Event) -> None:
            events.append(event)
            losses(event)

        loop = RolloutLoop(instances, chosen, context, events=note, stall_deadline_s=60.0)
        losses = Losses(loop, instances, dice)
        loop.scheduler = Meddling(loop, seed, park=0.3)
        for instance in instances:
            await instance.start(loop.on_output)
        found = [result async for result in loop.run(groups)]
        loop.buffer.check()
        loop.fleet.check()
        for instance in instances:
            await instance.close()
        return {PER_GROUP * r.group + one.index: one.token_ids for r in found for one in r.responses}

    size = block_bytes(read_config(folder), 8, torch.float32)
    with a_local_pool(tmp_path, block_bytes=size, dram_blocks=512, ssd_blocks=512) as pool:
        tokens = asyncio.run(rollout(pool))
    assert tokens == {request: answer.ids for request, answer in whole.items()}
    assert any(isinstance(event, Stopped) and event.reason == "parked" for event in events)


class Losses:
    """Loses an instance to the driver at random events. The driver then hears outputs of attempts that have ended."""

    def __init__(self, loop: RolloutLoop, instances: Sequence[Instance], dice: random.Random) -> None:
        self._loop, self._instances, self._dice = loop, instances, dice
        self._tasks: set[asyncio.Task[None]] = set()
        self.num = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Extended | Started) and self._dice.random() < 0.04 and not self._tasks:
            task = asyncio.get_running_loop().create_task(self._lose(self._dice.randrange(len(self._instances))))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _lose(self, lost: int) -> None:
        if self._loop.buffer.drained:
            return
        self.num += 1
        gone = [request.id for request in self._loop.buffer.requests() if request.instance == lost]
        self._loop.lose_instance(lost)
        for request in gone:
            self._instances[lost].abort(request)
        await self._instances[lost].pause()  # the commands before it have been carried out
        await self._instances[lost].resume()
        self._loop.rejoin_instance(lost)
