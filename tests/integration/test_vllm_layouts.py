# SPDX-License-Identifier: Apache-2.0
"""Requests move between real vLLM engines whose KV is laid out in other ways: on two ranks, with experts, as a latent.

Each pair of engines is started once. Everything is compared with one uninterrupted run without drafts.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from expert_models import make_deepseek, make_qwen3_moe
from processes import descendants
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig
from seer.types import TokenSpan
from vllm_engines import LoopThread, named_segments, needs_vllm
from vllm_pair import CHUNK_TOKENS, RESPONSE_TOKENS, Pair, ids, raw, running

pytestmark = [*needs_vllm, pytest.mark.timeout(600)]  # six processes start for two engines of two ranks

LAYOUTS = {
    "Qwen3-MoE on two ranks": (make_qwen3_moe, {"tensor_parallel": 2}),
    "DeepSeek-V3 on one rank": (make_deepseek, {}),
}
NUM_REQUESTS = 4
NUM_MOVES = NUM_REQUESTS * (RESPONSE_TOKENS // CHUNK_TOKENS - 1)


@pytest.fixture(scope="module", params=LAYOUTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    from seer.engine.vllm.fitting import fit_to_model
    from seer.engine.vllm.model_folder import read_folder
    from vllm_engines import vllm_settings

    make, settings = LAYOUTS[request.param]
    folder = make(tmp_path_factory.mktemp("model") / "tiny")
    fitted = fit_to_model(vllm_settings(folder, **settings), read_folder(folder))
    assert fitted.block_size is not None, "a CPU has one of its own"
    config: dict[str, Any] = {
        "name": f"test-{uuid.uuid4().hex[:8]}",
        "block_bytes": read_folder(folder).block_bytes(fitted.block_size, 4, fitted.tensor_parallel),
        "dram_bytes": 32 << 20,
    }
    thread = LoopThread()
    with LocalPool(LocalPoolConfig(populate=False, **config)) as pool:
        made = Pair(folder, {"backend": "local", "populate": False, **config}, thread, settings)
        yield from running(made)
        pool.close(remove=True)
    thread.close()


def test_a_moving_group_with_drafts_has_the_tokens_of_one_uninterrupted_run(pair: Pair) -> None:
    async def scenario() -> list[tuple[list[TokenSpan], list[TokenSpan]]]:
        await pair.begin("grouped")
        moved = await asyncio.gather(*(pair.moving(variant) for variant in range(NUM_REQUESTS)))
        block_size = pair.instances[0].limits.block_size
        assert sum(instance.num_recomputed_tokens for instance in pair.instances) < block_size * NUM_MOVES
        assert await pair.counts("loaded_blocks") >= pair.num_ranks * NUM_MOVES, "each rank loads its part"
        assert await pair.counts("missed_blocks") == 0
        assert sum(instance.view().num_accepted for instance in pair.instances) > 0
        await pair.begin("none")
        return [(moved[i], await pair.whole(i)) for i in range(NUM_REQUESTS)]

    for moved, whole in pair.thread.run(scenario()):
        assert ids(moved) == ids(whole)
        assert raw(moved) == pytest.approx(raw(whole), abs=1e-4)


def test_memory_between_the_ranks_has_no_name_that_would_outlive_them(pair: Pair) -> None:
    processes = descendants(os.getpid())
    assert any("/dev/shm/" in Path(f"/proc/{pid}/maps").read_text() for pid in processes), "they share memory"
    assert named_segments(processes) == []
