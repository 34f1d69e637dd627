# SPDX-License-Identifier: Apache-2.0
"""Blocks copied to the pool and back, with memory that the pool can access and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from seer.engine.local.cache import KVCache
from seer.engine.local.model_config import read_config
from seer.engine.local.tiny import make_tiny_model

NUM_BLOCKS, BLOCK_SIZE = 8, 4


class Shelf:
    """What a pool does with blocks, without a pool."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}

    def put_now(self, keys: list[bytes], buffers: Any, owners: Any = None) -> list[bool]:
        self.held |= {key: bytes(buffer) for key, buffer in zip(keys, buffers, strict=True)}
        return [True] * len(keys)

    def get_now(self, keys: list[bytes], buffers: Any) -> list[bool]:
        for key, buffer in zip(keys, buffers, strict=True):
            if key in self.held:
                np.copyto(buffer, np.frombuffer(self.held[key], np.uint8))
        return [key in self.held for key in keys]


@pytest.fixture
def cache(tmp_path: Path) -> KVCache:
    config = read_config(make_tiny_model(tmp_path / "tiny"))
    made = KVCache(
        config, num_blocks=NUM_BLOCKS, num_scratch_tokens=1, block_size=BLOCK_SIZE, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    made.tensor.copy_(torch.randn(made.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return made


@pytest.mark.parametrize("reads_copied", [False, True])
@pytest.mark.parametrize("writes_copied", [False, True])
def test_a_block_comes_back_as_it_was_wherever_it_is_put(
    cache: KVCache, reads_copied: bool, writes_copied: bool
) -> None:
    shelf: Any = Shelf()
    before = cache.tensor.clone()
    cache.is_host_memory = not reads_copied
    assert cache.export(shelf, [b"a", b"b", b"c"], [5, 0, 3], "r") == [True] * 3
    cache.is_host_memory = not writes_copied
    assert cache.fetch(shelf, [b"c", b"a"], [1, 7]) == 2
    assert torch.equal(cache.tensor[[1, 7]], before[[3, 5]])
    kept = [0, 2, 3, 4, 5, 6]
    assert torch.equal(cache.tensor[kept], before[kept])


@pytest.mark.parametrize("copied", [False, True])
def test_only_the_leading_blocks_count(cache: KVCache, copied: bool) -> None:
    shelf: Any = Shelf()
    cache.is_host_memory = not copied
    before = cache.tensor.clone()
    cache.export(shelf, [b"a", b"c"], [0, 2], "r")
    assert cache.fetch(shelf, [b"a", b"missing", b"c"], [4, 5, 6]) == 1
    assert torch.equal(cache.tensor[4], before[0])
    assert cache.fetch(shelf, [b"missing"], [5]) == 0
