# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks save and load their own parts of KV blocks; without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from seer.errors import ConfigError
from seer.kvpool.none import NonePool
from vllm_engines import needs_vllm

pytestmark = needs_vllm

KEYS = [bytes([i]) * 32 for i in range(4)]


class MemoryPool(NonePool):
    """Holds blocks in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[bytes, bytes] = {}
        self.pinned: set[bytes] = set()

    def lookup_now(self, keys: Any) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def pin(self, request_id: str, keys: Any) -> int:
        held = self.lookup_now(keys)
        self.pinned.update(keys[:held])
        return held

    def put_now(self, keys: Any, buffers: Any, owners: Any = None) -> list[bool]:
        self.blocks.update({key: bytes(buffer) for key, buffer in zip(keys, buffers, strict=True)})
        return [True] * len(keys)

    def get_now(self, keys: Any, buffers: Any) -> list[bool]:
        for key, buffer in zip(keys, buffers, strict=True):
            memoryview(buffer).cast("B")[:] = self.blocks[key]
        return [True] * len(keys)


def a_config(
    tensor_parallel: int, *, kv_heads: int = 8, use_mla: bool = False, also: dict[str, int] | None = None
) -> Any:
    model = SimpleNamespace(use_mla=use_mla, get_total_num_kv_heads=lambda: kv_heads)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel, **(also or {})), model_config=model
    )


@pytest.mark.parametrize(
    ("config", "parts", "savers"),
    [
        (a_config(1), [0], [0]),
        (a_config(4), [0, 1, 2, 3], [0, 1, 2, 3]),
        (a_config(4, kv_heads=2), [0, 0, 1, 1], [0, 2]),
        (a_config(4, use_mla=True), [0, 0, 0, 0], [0]),
    ],
    ids=["one rank", "a part each", "repeated heads", "latent"],
)
def test_ranks_with_equal_bytes_share_a_part_that_one_of_them_saves(
    config: Any, parts: list[int], savers: list[int]
) -> None:
    from seer.engine.vllm.connector_parts import kv_parts

    found = kv_parts(config)
    assert [found.part_of(rank) for rank in range(found.num_ranks)] == parts
    assert [rank for rank in range(found.num_ranks) if found.saves(rank)] == savers


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "decode_context_parallel_size"])
def test_an_engine_that_is_spread_in_another_way_is_refused(name: str) -> None:
    from seer.engine.vllm.connector_parts import kv_parts

    with pytest.raises(ConfigError, match=f"{name}=2"):
        kv_parts(a_config(2, also={name: 2}))


def test_engines_that_share_experts_hold_whole_blocks() -> None:
    from seer.engine.vllm.connector_parts import kv_parts

    assert kv_parts(a_config(2, also={"data_parallel_size": 4})) == kv_parts(a_config(2))


def test_kv_memory_of_several_kinds_is_refused() -> None:
    from seer.engine.vllm.connector_parts import kv_layout

    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(), layer_names=["a"])
    with pytest.raises(ConfigError, match="2 groups"):
        kv_layout(a_config(1), SimpleNamespace(kv_cache_groups=[group, group]))  # type: ignore[arg-type]


def test_the_number_of_ranks_and_the_latent_are_in_the_layout() -> None:
    from seer.engine.vllm.connector_parts import kv_layout

    spec = SimpleNamespace(num_kv_heads=1, head_size=576, dtype=torch.float32, block_size=16)
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])])
    layouts = [kv_layout(a_config(ranks, use_mla=mla), cache) for ranks in (1, 2) for mla in (False, True)]
    assert len(set(layouts)) == 4
    assert [layout.num_ranks for layout in layouts] == [1, 1, 2, 2]
    assert [layout.kind for layout in layouts] == ["kv", "latent", "kv", "latent"]


def test_a_block_is_held_only_when_all_its_parts_are() -> None:
    from seer.engine.vllm.connector_parts import WholeBlocks
    from seer.kvpool.keys import keys_of_part

    pool = MemoryPool()
    whole = WholeBlocks(pool, 2)
    pool.blocks.update(dict.fromkeys(keys_of_part(KEYS, 0), b""))
    assert whole.lookup_now(KEYS) == 0
    pool.blocks.update(dict.fromkeys(keys_of_part(KEYS[:3], 1), b""))
    assert (whole.lookup_now(KEYS), whole.pin("7", KEYS)) == (3, 3)
    assert set(keys_of_part(KEYS[:3], 1)) <= pool.pinned


@pytest.mark.parametrize(("num_parts", "num_saved"), [(2, 4), (1, 2)], ids=["a part each", "equal parts"])
def test_each_rank_gets_back_what_the_rank_with_its_part_saved(num_parts: int, num_saved: int) -> None:
    from seer.config import TransferOptions
    from seer.engine.vllm.connector_parts import KVParts
    from seer.engine.vllm.connector_plan import LoadJob, SaveJob
    from seer.engine.vllm.connector_transfer import BlockTransfer

    def ranks(memory: list[Any]) -> list[BlockTransfer]:
        made = [BlockTransfer(pool, TransferOptions(), parts=KVParts(2, num_parts), rank=rank) for rank in range(2)]
        for transfer, own in zip(made, memory, strict=True):
            transfer.use([own], 10)
        return made

    pool = MemoryPool()
    parts = [torch.randn(10, 4, 6) for _ in range(num_parts)]
    here = [parts[rank * num_parts // 2].clone() for rank in range(2)]
    there = [torch.zeros(10, 4, 6) for _ in range(2)]
    for sender in ranks(here):
        sender.save([SaveJob("7", KEYS[:2], [3, 4])], [])
        sender.close()
    assert len(pool.blocks) == num_saved
    for receiver in ranks(there):
        receiver.load([LoadJob("b", KEYS[:2], [8, 1], False)])
        receiver.close()
    for mine, theirs in zip(here, there, strict=True):
        assert torch.equal(mine[[3, 4]], theirs[[8, 1]])


def test_a_pool_that_was_made_for_smaller_blocks_is_refused() -> None:
    from seer.engine.vllm.connector import SeerPoolConnector

    connector: Any = object.__new__(SeerPoolConnector)
    connector._transfer = SimpleNamespace(use=lambda caches, num_blocks: None, block_bytes=4096)
    connector._pool_block_bytes, connector._num_blocks = 2048, 8
    with pytest.raises(ConfigError, match="4096 bytes on each rank, the pool was made for 2048"):
        connector.register_kv_caches({})
