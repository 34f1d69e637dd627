# SPDX-License-Identifier: Apache-2.0
"""A driver that rolls out again and again keeps nothing of earlier rollouts (20,000 requests: benchmarks/soak)."""

from __future__ import annotations

import asyncio
import gc

from seer import HostingConfig, Rollout, Sampling

PROMPTS = [[3 + i, 7, 11] for i in range(10)]
SAMPLES = 4
NUM_ROLLOUTS = 20


async def num_objects(rollout: Rollout, num_rollouts: int) -> int:
    """The objects that the collector knows after so many more rollouts."""
    for number in range(num_rollouts):
        async for _ in rollout.run(PROMPTS, n=SAMPLES, sampling=Sampling(max_tokens=8), seed=number):
            pass
    gc.collect()
    return len(gc.get_objects())


def test_rollouts_that_are_over_leave_no_object_per_request_behind() -> None:
    async def scenario() -> tuple[int, int]:
        hosting = HostingConfig(pin_cores=False)
        async with Rollout("fake", engine="fake", instances=2, hosting=hosting, chunk_tokens=4) as rollout:
            before = await num_objects(rollout, NUM_ROLLOUTS)
            return before, await num_objects(rollout, NUM_ROLLOUTS)

    before, after = asyncio.run(scenario())
    num_requests = NUM_ROLLOUTS * len(PROMPTS) * SAMPLES
    assert after - before < num_requests // 4, f"{before} objects became {after} over {num_requests} requests"
