# SPDX-License-Identifier: Apache-2.0
"""The queue of due chunks against a brute-force twin: all chunks, sorted at every look."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from seer.sim.chunk_run import ChunkRun, DueQueue
from seer.types import Chunk, Sampling


def a_run(request: int) -> ChunkRun:
    chunk = Chunk(
        request=request,
        group=0,
        attempt=1,
        num_prompt_tokens=1,
        num_generated_tokens=0,
        max_tokens=100,
        sampling=Sampling(max_tokens=100),
        seed=0,
        weights_version=0,
    )
    return ChunkRun(chunk, 100)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_chunks_come_by_step_and_then_by_request(seed: int) -> None:
    random = Random(seed)
    runs = [a_run(request) for request in range(12)]
    random.shuffle(runs)
    queue, due = DueQueue(), dict[int, float]()  # the twin: request -> step
    for _ in range(200):
        run, step = random.choice(runs), random.choice([8.0, 16.0, 24.0, 9.5, 17.25])
        match random.randrange(6):
            case 0:
                queue.remove(run)
                due.pop(run.chunk.request, None)
            case 1:
                for one in runs:
                    if one.due_step < math.inf and random.random() < 0.5:
                        one.due_step = due[one.chunk.request] = random.choice([8.0, 32.0, 11.5])
                queue.replace(one for one in runs if one.due_step < math.inf)
            case _:
                queue.put(run, step)
                due[run.chunk.request] = step
        assert {one.chunk.request: one.due_step for one in runs if one.due_step < math.inf} == due
        first = min(due.values(), default=math.inf)
        assert queue.first_step() == first
        if due:
            assert [one.chunk.request for one in queue.at(first)] == sorted(r for r in due if due[r] == first)
    for step in sorted(set(due.values())):
        assert queue.first_step() == step
        for one in queue.at(step):
            queue.remove(one)
    assert queue.first_step() == math.inf
