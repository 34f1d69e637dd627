# SPDX-License-Identifier: Apache-2.0
"""The simulated instance, which advances in closed form, against a slow twin that simulates every step."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from builders import a_cost, a_group, limits
from seer.sim import virtual_time
from seer.sim.costs import InstanceCost
from seer.sim.instance import MAX_BATCHED_TOKENS, SimulatedInstance
from seer.types import Chunk, ChunkOutput, InstanceLimits, Sampling

PROMPT = 40


@dataclass
class Walk:
    """A request of the twin."""

    request: int
    left: int
    context: int
    prefill_left: float = 0.0


def step_by_step(cost: InstanceCost, room: InstanceLimits, lengths: list[int]) -> list[float]:
    """End times of requests of different groups, all submitted at time 0, decoding one token per step."""
    waiting = deque(Walk(request, length, PROMPT) for request, length in enumerate(lengths))
    prefilling: list[Walk] = []
    running: list[Walk] = []
    ends = [0.0] * len(lengths)
    now_s = 0.0

    def used() -> int:
        return sum(walk.context for walk in (*running, *prefilling))

    while waiting or prefilling or running:
        while (
            waiting
            and len(running) + len(prefilling) < room.max_num_seqs
            and used() + waiting[0].context + 1 <= room.kv_tokens
        ):
            walk = waiting.popleft()
            walk.prefill_left = walk.context
            prefilling.append(walk)
        budget = max(256.0, MAX_BATCHED_TOKENS - len(running))
        carried = 0.0
        decoding = list(running)
        for walk in list(prefilling):
            piece = min(walk.prefill_left, budget - carried)
            carried += piece
            walk.prefill_left -= piece
            if walk.prefill_left <= 0:
                prefilling.remove(walk)
                running.append(walk)
        step = cost.step(len(decoding), 1.0, carried)
        now_s += step.base_s + step.per_context_token_s * sum(walk.context for walk in decoding)
        for walk in decoding:
            walk.context += 1
            walk.left -= 1
            if walk.left == 0:
                running.remove(walk)
                ends[walk.request] = now_s
        while used() + len(running) > room.kv_tokens:
            last = running.pop()
            waiting.appendleft(last)
    return ends


def jumping(cost: InstanceCost, room: InstanceLimits, lengths: list[int]) -> list[float]:
    """The same by the simulated instance."""
    ends = [0.0] * len(lengths)

    async def main() -> None:
        clock, done = asyncio.get_running_loop(), asyncio.Event()
        instance = SimulatedInstance(0, cost, room, lengths.__getitem__)

        def sink(output: ChunkOutput) -> None:
            assert output.end is not None
            assert output.num_tokens == lengths[output.request]
            ends[output.request] = clock.time()
            if all(ends):
                done.set()

        await instance.start(sink)
        for request in range(len(lengths)):
            instance.submit(a_chunk(request, max(lengths)))
        await done.wait()

    virtual_time.run(main())
    return ends


def a_chunk(request: int, max_tokens: int) -> Chunk:
    return Chunk(
        request=request,
        group=a_group(request).id,
        attempt=1,
        num_prompt_tokens=PROMPT,
        num_generated_tokens=0,
        max_tokens=max_tokens,
        sampling=Sampling(max_tokens=max_tokens),
        seed=0,
        weights_version=0,
        load_kv=False,
    )


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=25),
    spare=st.integers(0, 20),
    max_num_seqs=st.sampled_from([1, 3, 1000]),
    bandwidth=st.sampled_from([1e7, 1e8, 1e9]),
)
def test_jumping_is_stepping(lengths: list[int], spare: int, max_num_seqs: int, bandwidth: float) -> None:
    cost = a_cost(kv_tokens=64 * (8 + spare), overhead_s=0.002, bandwidth_bytes_s=bandwidth)
    room = limits(cost.kv_tokens // 64, max_num_seqs=max_num_seqs)
    slow, fast = step_by_step(cost, room, lengths), jumping(cost, room, lengths)

    # Steps are continuous quantities in the fast one: it may be off by a step here and there, and by what a
    # preemption one step earlier or later recomputes.
    assert abs(max(fast) - max(slow)) <= 0.05 * max(slow) + 0.05, (max(fast), max(slow))


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(20, 400), min_size=1, max_size=25),
    bandwidth=st.sampled_from([1e7, 1e8, 1e9]),
)
def test_with_room_for_all_every_end_time_agrees(lengths: list[int], bandwidth: float) -> None:
    cost = a_cost(kv_tokens=64 * 300, overhead_s=0.002, bandwidth_bytes_s=bandwidth)
    room = limits(300)
    slow, fast = step_by_step(cost, room, lengths), jumping(cost, room, lengths)
    for expected, got in zip(slow, fast, strict=True):
        assert abs(got - expected) <= 0.01 * expected + 0.01, (expected, got)
