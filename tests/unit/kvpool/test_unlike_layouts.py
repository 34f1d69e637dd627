# SPDX-License-Identifier: Apache-2.0
"""Instances of unlike tensor parallelism on one pool: each finds its own blocks, and nothing of the other's."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from seer.engine.vllm.connector_parts import WholeBlocks, kv_layout, kv_parts
from seer.kvpool.base import Pool
from seer.kvpool.keys import Namespace, block_keys, keys_of_part
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig

BLOCK_SIZE, HEAD_DIM, KV_HEADS = 4, 8, 2
TOKENS = list(range(3 * BLOCK_SIZE))


class Ranks:
    """The ranks of one instance, with the keys and parts that vLLM's configuration gives them."""

    def __init__(self, num_ranks: int, use_mla: bool, pool: Pool) -> None:
        self.pool = pool
        heads = 1 if use_mla else KV_HEADS // num_ranks
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=num_ranks),
            model_config=SimpleNamespace(use_mla=use_mla, get_total_num_kv_heads=lambda: KV_HEADS),
        )
        spec = SimpleNamespace(num_kv_heads=heads, head_size=HEAD_DIM, dtype=torch.float32, block_size=BLOCK_SIZE)
        cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])])
        layout, self.parts = kv_layout(config, cache), kv_parts(config)
        self.keys = [bytes(key) for key in block_keys(Namespace(model="m", weights_version=0, layout=layout), TOKENS)]
        shape = (self.parts.num_parts, len(self.keys), layout.block_bytes(4))
        self.kv = np.random.default_rng(num_ranks).integers(1, 256, shape, dtype=np.uint8)

    def save(self) -> None:
        for part, rows in enumerate(self.kv):
            assert all(self.pool.put_now(keys_of_part(self.keys, part), rows))

    def load(self) -> Any:
        found = np.zeros_like(self.kv)
        for part, rows in enumerate(found):
            self.pool.get_now(keys_of_part(self.keys, part), rows)
        return found

    def num_held(self) -> int:
        return WholeBlocks(self.pool, self.parts.num_parts).lookup_now(self.keys)


@pytest.mark.parametrize("use_mla", [False, True], ids=["heads", "latent"])
def test_unlike_ranks_share_a_pool_and_no_block(use_mla: bool) -> None:
    largest = 2 * KV_HEADS * HEAD_DIM * BLOCK_SIZE * 4  # those of one rank
    config = LocalPoolConfig(
        name=f"test-{uuid.uuid4().hex[:8]}", block_bytes=largest, dram_bytes=1 << 20, populate=False
    )
    with LocalPool(config) as pool:
        one, two = Ranks(1, use_mla, pool), Ranks(2, use_mla, pool)
        one.save()
        assert (one.num_held(), two.num_held()) == (3, 0)
        assert not two.load().any()
        two.save()
        assert (one.num_held(), two.num_held()) == (3, 3)
        for ranks in (one, two):
            assert (ranks.load() == ranks.kv).all()
        pool.close(remove=True)
