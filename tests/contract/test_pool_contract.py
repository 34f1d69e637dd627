# SPDX-License-Identifier: Apache-2.0
"""One suite over `local`, `mooncake` and a near tier over either: what base.py promises.

`NonePool` holds nothing, and has a test of its own.

`mooncake` needs the extra of that name and libibverbs; without them its cases are skipped and say so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pools import a_local_pool, needs_mooncake
from seer.errors import PoolError
from seer.kvpool.base import Pool
from seer.kvpool.keys import KeyArray, KVLayout, Namespace, block_keys
from seer.kvpool.local import LocalPool
from seer.kvpool.mooncake import MooncakePool, MooncakePoolConfig
from seer.kvpool.mooncake_servers import MooncakeServers, MooncakeServersConfig
from seer.kvpool.node_pool import NodePool
from seer.kvpool.none import NonePool

BLOCK_BYTES = 64 << 10
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", block_size=4)


def keys_of(
    num_blocks: int, *, weights_version: int = 1, model: str = "m", first: int = 0, layout: KVLayout = LAYOUT
) -> KeyArray:
    namespace = Namespace(model=model, weights_version=weights_version, layout=layout)
    return block_keys(namespace, np.arange(num_blocks * layout.block_size) + first)


def blocks_of(num_blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, BLOCK_BYTES), dtype=np.uint8)


@pytest.fixture(scope="module")
def mooncake_servers() -> Iterator[MooncakeServers]:
    needs_mooncake()
    with MooncakeServers(MooncakeServersConfig(dram_bytes=256 << 20, client_ttl_s=5)) as servers:
        yield servers


# One client for all tests of a kind: to close one takes Mooncake a second.
@pytest.fixture(scope="module")
def mooncake_shared(mooncake_servers: MooncakeServers) -> Iterator[MooncakePool]:
    config = MooncakePoolConfig(owner_address=mooncake_servers.owner_address, block_bytes=BLOCK_BYTES, deadline_s=10.0)
    with MooncakePool(config) as opened:
        yield opened


@pytest.fixture(scope="module")
def mooncake_tcp(mooncake_servers: MooncakeServers) -> Iterator[MooncakePool]:
    config = MooncakePoolConfig(
        master_address=mooncake_servers.master_address, block_bytes=BLOCK_BYTES, deadline_s=10.0
    )
    with MooncakePool(config) as opened:
        yield opened


@pytest.fixture(params=["local", "mooncake_shared", "mooncake_tcp", "near_over_local", "near_over_mooncake"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pool]:
    """A pool that holds blocks, empty at the start of each test."""
    kind = request.param.removeprefix("near_over_")
    with contextlib.ExitStack() as stack:
        opened: Pool
        if kind == "local":
            own = a_local_pool(tmp_path, block_bytes=BLOCK_BYTES, dram_blocks=32, ssd_blocks=128)
            opened = stack.enter_context(own)
        else:
            client: MooncakePool = request.getfixturevalue("mooncake_shared" if kind == "mooncake" else kind)
            client.remove_all()
            opened = client
        if kind != request.param:
            near = stack.enter_context(a_local_pool(tmp_path, block_bytes=BLOCK_BYTES, dram_blocks=16, ssd_blocks=0))
            opened = NodePool(near, opened)
        yield opened


def another_handle(pool: Pool) -> Pool:
    """The same pool as another instance would open it."""
    if isinstance(pool, NodePool):
        return NodePool(another_handle(pool.near), another_handle(pool.far))
    if isinstance(pool, LocalPool):
        return LocalPool.attach(pool.config.name, pool.config.dram_dir)
    assert isinstance(pool, MooncakePool)
    return MooncakePool(pool.config)


def test_every_backend_is_a_pool(pool: Pool) -> None:
    assert isinstance(pool, Pool)
    assert isinstance(NonePool(), Pool)


def test_what_was_put_comes_back(pool: Pool) -> None:
    keys, blocks, out = keys_of(12), blocks_of(12), np.zeros((12, BLOCK_BYTES), np.uint8)

    assert pool.put_now(keys, blocks) == [True] * 12
    assert pool.get_now(keys, out) == [True] * 12
    assert np.array_equal(out, blocks)


def test_the_asynchronous_calls_do_the_same(pool: Pool) -> None:
    async def scenario() -> None:
        keys, blocks, out = keys_of(6), blocks_of(6), np.zeros((6, BLOCK_BYTES), np.uint8)
        assert await pool.lookup(keys) == 0
        assert await pool.put(keys, blocks) == [True] * 6
        assert await pool.lookup(keys) == 6
        assert await pool.get(keys, out) == [True] * 6
        assert np.array_equal(out, blocks)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_buffers_may_be_any_contiguous_memory(pool: Pool) -> None:
    keys, blocks = keys_of(3), blocks_of(3)
    mixed = [blocks[0], memoryview(blocks[1]), bytearray(blocks[2])]
    out: list[Any] = [
        np.zeros(BLOCK_BYTES // 4, np.float32),
        bytearray(BLOCK_BYTES),
        memoryview(bytearray(BLOCK_BYTES)),
    ]

    assert pool.put_now(keys, mixed) == [True] * 3
    assert pool.get_now(keys, out) == [True] * 3
    assert [bytes(b) for b in out] == [bytes(b) for b in blocks]


def test_keys_may_be_a_list_of_bytes(pool: Pool) -> None:
    keys, blocks = [bytes(k) for k in keys_of(2)], blocks_of(2)
    assert pool.put_now(keys, blocks) == [True, True]
    assert pool.lookup_now(keys) == 2


def test_an_absent_block_is_a_miss_and_the_others_are_not(pool: Pool) -> None:
    keys, blocks, out = keys_of(5), blocks_of(5), np.zeros((5, BLOCK_BYTES), np.uint8)
    pool.put_now(keys[[0, 1, 3]], blocks[[0, 1, 3]])

    assert pool.get_now(keys, out) == [True, True, False, True, False]
    assert np.array_equal(out[[0, 1, 3]], blocks[[0, 1, 3]])


def test_lookup_counts_only_the_leading_run(pool: Pool) -> None:
    keys, blocks = keys_of(5), blocks_of(5)
    assert pool.lookup_now(keys) == 0
    pool.put_now(keys[[0, 1, 3]], blocks[[0, 1, 3]])
    assert pool.lookup_now(keys) == 2
    assert pool.lookup_now(keys[3:]) == 1
    assert pool.lookup_now(keys[:0]) == 0


def test_putting_a_held_key_changes_nothing(pool: Pool) -> None:
    keys, blocks, out = keys_of(1), blocks_of(1), np.zeros((1, BLOCK_BYTES), np.uint8)
    pool.put_now(keys, blocks)
    assert pool.put_now(keys, blocks_of(1, seed=9)) == [True]
    assert pool.get_now(keys, out) == [True]
    assert np.array_equal(out, blocks)


@pytest.mark.parametrize(
    "other",
    [
        {"weights_version": 2},
        {"model": "n"},
        {"layout": KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="bfloat16", block_size=4)},
        {"layout": KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", block_size=4, num_ranks=2)},
    ],
    ids=["weights_version", "model", "dtype", "shard"],
)
def test_a_reader_of_another_weights_version_model_or_layout_never_hits(pool: Pool, other: dict[str, object]) -> None:
    pool.put_now(keys_of(4), blocks_of(4))
    out = np.zeros((4, BLOCK_BYTES), np.uint8)
    assert pool.lookup_now(keys_of(4, **other)) == 0  # type: ignore[arg-type]
    assert pool.get_now(keys_of(4, **other), out) == [False] * 4  # type: ignore[arg-type]


def test_a_buffer_of_another_size_is_a_miss(pool: Pool) -> None:
    pool.put_now(keys_of(1), blocks_of(1))
    assert pool.get_now(keys_of(1), [bytearray(BLOCK_BYTES // 2)]) == [False]
    assert pool.get_now(keys_of(1), [bytearray(BLOCK_BYTES)]) == [True]


def test_blocks_may_be_smaller_than_a_slot(pool: Pool) -> None:
    keys, block, out = keys_of(1), np.arange(1000, dtype=np.uint8), np.zeros(1000, np.uint8)
    assert pool.put_now(keys, [block]) == [True]
    assert pool.get_now(keys, [out]) == [True]
    assert np.array_equal(out, block)


def test_misuse_raises(pool: Pool) -> None:
    with pytest.raises(ValueError, match="as many"):
        pool.put_now(keys_of(2), [bytearray(BLOCK_BYTES)])
    with pytest.raises(TypeError):
        pool.lookup_now([b"short"])


def test_free_drops_what_no_other_request_has_pinned(pool: Pool) -> None:
    prompt, tail_a, tail_b = keys_of(2), keys_of(3, first=1000), keys_of(3, first=2000)
    pool.put_now(prompt, blocks_of(2), owners="a")
    assert pool.pin("b", prompt) == 2
    pool.put_now(tail_a, blocks_of(3, 1), owners="a")
    pool.put_now(tail_b, blocks_of(3, 2), owners="b")

    assert pool.free("a") == 3
    assert [pool.lookup_now(k) for k in (prompt, tail_a, tail_b)] == [2, 0, 3]
    assert pool.free("b") == 5
    assert [pool.lookup_now(k) for k in (prompt, tail_b)] == [0, 0]
    assert pool.free("b") == 0


def test_blocks_of_one_call_may_belong_to_different_requests(pool: Pool) -> None:
    keys = keys_of(4)
    assert pool.put_now(keys, blocks_of(4), owners=["a", "b", "b", "c"]) == [True] * 4
    assert pool.free("b") == 2
    assert [pool.lookup_now(keys[i : i + 1]) for i in range(4)] == [1, 0, 0, 1]
    assert (pool.free("a"), pool.free("c")) == (1, 1)
    with pytest.raises(ValueError):
        pool.put_now(keys, blocks_of(4), owners=["a", "b"])


def test_a_block_that_comes_twice_in_one_call_is_held_once_for_both_its_owners(pool: Pool) -> None:
    key, block = keys_of(1), blocks_of(1)
    twice = pool.put_now(np.concatenate([key, key]), np.concatenate([block, block]), owners=["a", "b"])
    assert twice == [True, True]
    assert pool.free("a") == 0
    assert pool.lookup_now(key) == 1
    assert pool.free("b") == 1
    assert pool.lookup_now(key) == 0


def test_release_keeps_the_blocks(pool: Pool) -> None:
    keys = keys_of(3)
    pool.put_now(keys, blocks_of(3), owners="a")
    assert pool.release("a") == 3
    assert pool.lookup_now(keys) == 3
    assert pool.free("a") == 0
    assert pool.lookup_now(keys) == 3


def test_pin_takes_the_leading_run_and_twice_is_once(pool: Pool) -> None:
    keys = keys_of(4)
    pool.put_now(keys[:2], blocks_of(2))
    assert pool.pin("a", keys) == 2
    assert pool.pin("a", keys) == 2
    assert pool.release("a") == 2


def test_dropping_a_weights_version_ends_it_and_no_other(pool: Pool) -> None:
    old, new, blocks = keys_of(4, weights_version=1), keys_of(4, weights_version=2), blocks_of(4)
    pool.put_now(old, blocks, owners="a")
    pool.put_now(new, blocks)
    assert pool.drop_weights_version(1) == 4
    assert (pool.lookup_now(old), pool.lookup_now(new)) == (0, 4)
    assert pool.put_now(old, blocks) == [False] * 4, "a put of a dropped weights version must not be kept"
    assert pool.lookup_now(old) == 0
    assert pool.get_now(old, np.zeros((4, BLOCK_BYTES), np.uint8)) == [False] * 4
    assert pool.drop_weights_version(1) == 0
    assert pool.drop_weights_version(2) == 4


def test_prefetch_is_a_hint(pool: Pool) -> None:
    keys = keys_of(4)
    pool.put_now(keys[:2], blocks_of(2))
    pool.prefetch(keys)
    assert pool.lookup_now(keys) == 2


def test_the_counters_add_up(pool: Pool) -> None:
    before = pool.stats()
    keys, out = keys_of(4), np.zeros((4, BLOCK_BYTES), np.uint8)
    pool.put_now(keys[:3], blocks_of(3))
    pool.put_now(keys[:1], blocks_of(1))
    pool.get_now(keys, out)
    after = pool.stats()

    assert after.num_put - before.num_put == 4
    assert after.num_hit_dram + after.num_hit_ssd - before.num_hit_dram - before.num_hit_ssd == 3
    assert after.num_miss - before.num_miss == 1
    assert after.bytes_got - before.bytes_got == 3 * BLOCK_BYTES
    assert after.latency["get"].num_calls - before.latency.get("get", after.latency["get"]).num_calls in (
        0,
        1,
    )
    assert after.num_corrupt == before.num_corrupt


def test_two_users_share_one_pool(pool: Pool) -> None:
    """A second handle, as another instance would open it, sees what the first one put."""
    keys, blocks, out = keys_of(4), blocks_of(4), np.zeros((4, BLOCK_BYTES), np.uint8)
    with another_handle(pool) as other:
        pool.put_now(keys, blocks)
        assert other.lookup_now(keys) == 4
        assert other.get_now(keys, out) == [True] * 4
        assert np.array_equal(out, blocks)


def test_a_cancelled_get_does_not_outlive_its_await(pool: Pool) -> None:
    async def scenario() -> None:
        keys, blocks, out = keys_of(12), blocks_of(12), np.zeros((12, BLOCK_BYTES), np.uint8)
        await pool.put(keys, blocks)
        task = asyncio.ensure_future(pool.get(keys, out))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        out[:] = 7  # no thread writes into it any more
        assert (out == 7).all()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_closing_twice_is_closing_once_and_leaves_the_blocks_to_others(pool: Pool) -> None:
    pool.put_now(keys_of(2), blocks_of(2))
    other = another_handle(pool)
    other.close()
    other.close()
    with pytest.raises(PoolError, match="closed"):
        other.lookup_now(keys_of(2))
    assert pool.lookup_now(keys_of(2)) == 2


def test_none_holds_nothing_and_raises_only_when_misused() -> None:
    keys, blocks = keys_of(3), blocks_of(3)
    with NonePool() as none:
        assert none.put_now(keys, blocks, "a") == [False] * 3
        assert none.get_now(keys, blocks) == [False] * 3
        assert (none.lookup_now(keys), none.pin("a", keys), none.free("a"), none.drop_weights_version(1)) == (
            0,
            0,
            0,
            0,
        )
        assert asyncio.run(none.get(keys, blocks)) == [False] * 3
        assert none.stats().num_miss == 6
        for call in (none.put_now, none.get_now):
            with pytest.raises(ValueError, match="as many"):
                call(keys, blocks[:2])
            with pytest.raises(TypeError):
                call([b"short"], blocks[:1])
        with pytest.raises(TypeError):
            none.lookup_now([b"short"])
        assert (none.stats().num_miss, none.stats().num_refused) == (6, 3)
