# SPDX-License-Identifier: Apache-2.0
"""The embedded engine's pool brings KV back to DRAM before its request runs again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from engines import a_chunk
from pools import a_local_pool
from seer.engine.local import LocalInstance
from seer.engine.local.tiny import make_tiny_model
from seer.kvpool.keys import Keys
from seer.kvpool.local import LocalPool
from seer.types import Chunk, ChunkOutput, TokenSpan

DEADLINE_S = 30.0
PROMPT = list(range(3, 68))  # four blocks of 16, and one token


async def run_to_its_end(instance: LocalInstance, chunk: Chunk) -> tuple[TokenSpan, ...]:
    ended = asyncio.Event()
    spans: list[TokenSpan] = []

    def sink(output: ChunkOutput) -> None:
        if output.span is not None:
            spans.append(output.span)
        if output.end is not None:
            ended.set()

    await instance.start(sink)
    instance.submit(chunk)
    async with asyncio.timeout(DEADLINE_S):
        await ended.wait()
    return tuple(spans)


def wait_for_prefetch(pool: LocalPool, num_blocks: int) -> int:
    give_up_s = time.monotonic() + DEADLINE_S
    while pool.stats().num_prefetched < num_blocks and time.monotonic() < give_up_s:
        time.sleep(0.01)
    return pool.stats().num_prefetched


def test_a_hint_brings_the_blocks_that_the_instance_lacks_from_ssd_to_dram(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")

    async def scenario(pool: LocalPool) -> tuple[int, list[int], int]:
        first, second = (LocalInstance(i, folder, kv_blocks=32, pool=pool) for i in range(2))
        await second.start(lambda output: None)
        spans = await run_to_its_end(first, a_chunk(1, PROMPT, max_tokens=8))
        chunk = a_chunk(1, PROMPT, max_tokens=8, spans=spans)
        assert pool._arena is not None
        num_spilled = pool._arena.spill(16, False)
        asked: list[int] = []
        prefetch = pool.prefetch

        def noting(keys: Keys) -> None:
            asked.append(len(keys))
            prefetch(keys)

        pool.prefetch = noting  # type: ignore[method-assign]
        first.prefetch(chunk)  # it holds all of it
        second.prefetch(chunk)
        found = wait_for_prefetch(pool, num_spilled)
        await first.close()
        await second.close()
        return num_spilled, asked, found

    with a_local_pool(tmp_path, block_bytes=16384, dram_blocks=16, ssd_blocks=64) as pool:
        num_spilled, asked, found = asyncio.run(scenario(pool))
        assert num_spilled == 5  # the last one is not full
        assert (asked, found) == ([5], 5)
