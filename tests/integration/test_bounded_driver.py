# SPDX-License-Identifier: Apache-2.0
"""A driver that rolls out again and again keeps nothing of earlier rollouts (20,000 requests: benchmarks/soak).

What is in use is counted exactly, by Python and by the C library: resident memory also grows when memory is in pieces.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from held_memory import C, grown_since, held, malloc_bytes, may_grow
from seer import HostingConfig, Rollout, Sampling
from seer.buffer import Request
from seer.environments.base import Answer, Conversation, End, Reply
from seer.machine.collector import SELDOM
from seer.runs.results import complete
from seer.types import Response

PROMPTS = [[3 + i, 7, 11] for i in range(10)]
SAMPLES = 4
NUM_ROLLOUTS = 30
NUM_REQUESTS = NUM_ROLLOUTS * len(PROMPTS) * SAMPLES


async def roll_out(rollout: Rollout, num_rollouts: int) -> None:
    for number in range(num_rollouts):
        async for _ in rollout.run(PROMPTS, n=SAMPLES, sampling=Sampling(max_tokens=8), seed=number):
            pass


async def grown(rollout: Rollout) -> dict[str, int]:
    """What NUM_ROLLOUTS rollouts leave behind."""
    before = held()
    await roll_out(rollout, NUM_ROLLOUTS)
    return grown_since(before)


def a_rollout() -> Rollout:
    return Rollout("fake", engine="fake", instances=2, hosting=HostingConfig(pin_cores=False), chunk_tokens=4)


def too_much(growth: dict[str, int]) -> set[str]:
    return {name for name, most in may_grow(NUM_REQUESTS).items() if growth[name] > most}


def test_rollouts_that_are_over_leave_nothing_behind() -> None:
    async def scenario() -> tuple[dict[str, int], int, int]:
        async with a_rollout() as rollout:
            await roll_out(rollout, NUM_ROLLOUTS)  # caches fill
            growth = await grown(rollout)
            await roll_out(rollout, 4 * NUM_ROLLOUTS)
            uncollected = len(gc.get_objects())
            return growth, uncollected, held()["objects"]

    growth, uncollected, collected = asyncio.run(scenario())
    assert not too_much(growth), f"{growth} over {NUM_REQUESTS} requests"
    assert uncollected - collected < SELDOM[0], "garbage of rollouts that are over is collected while others run"


def num_requests() -> int:
    """That exist, garbage included."""
    return sum(type(one) is Request for one in gc.get_objects())


async def reward(prompt: object, response: object) -> float:
    return 1.0


async def two_turns(conversation: Conversation) -> Answer:
    return Reply(token_ids=[5, 6]) if conversation.turn == 1 else End(reward=1.0)


@pytest.mark.parametrize("settings", [{}, {"reward": reward, "keep": lambda _: True}, {"environment": two_turns}])
def test_requests_of_a_rollout_that_is_over_do_not_wait_for_the_collector(settings: dict[str, Any]) -> None:
    async def scenario() -> int:
        async with a_rollout() as rollout:
            for seed in range(3):
                async for _ in rollout.run(PROMPTS, n=SAMPLES, sampling=Sampling(max_tokens=8), seed=seed, **settings):
                    pass
            return num_requests()

    gc.collect()
    before = num_requests()
    gc.disable()
    try:
        num_alive = asyncio.run(scenario())
    finally:
        gc.enable()
    assert num_alive - before <= len(PROMPTS) * SAMPLES, "those of the last rollout, for its summary"


def test_what_is_kept_of_every_request_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaks that are planted where responses end; each is seen by the measure that should see it."""
    kept: list[Any] = []
    never = threading.Event()
    C.malloc.restype = ctypes.c_void_p
    leaks: dict[str, Callable[[Any], object]] = {
        "objects": lambda response: kept.append([response.group]),
        "blocks": lambda _: kept.append(os.urandom(64)),
        "bytes": lambda _: C.malloc(ctypes.c_size_t(1024)),
        "descriptors": lambda _: kept.append(os.dup(0)) if len(kept) < 8 else None,
        "threads": lambda _: kept.append(a_thread(never)) if len(kept) < 8 else None,
    }
    if not malloc_bytes():
        del leaks["bytes"]

    async def scenario() -> dict[str, set[str]]:
        noticed = {}
        async with a_rollout() as rollout:
            await roll_out(rollout, NUM_ROLLOUTS)
            for name, leak in leaks.items():
                kept.clear()

                def complete_and_keep(response: Response, *args: Any, leak: Any = leak, **settings: Any) -> None:
                    complete(response, *args, **settings)
                    leak(response)

                monkeypatch.setattr("seer.runs.run.complete", complete_and_keep)
                noticed[name] = too_much(await grown(rollout))
                if name == "descriptors":
                    for number in kept:
                        os.close(number)
        return noticed

    try:
        noticed = asyncio.run(scenario())
    finally:
        never.set()
    assert all(name in found for name, found in noticed.items()), noticed


def a_thread(end: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=end.wait, daemon=True)
    thread.start()
    return thread
