# SPDX-License-Identifier: Apache-2.0
"""The near tier of a node over a pool between nodes: which of the two is read, and what is counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pools import a_local_pool
from seer.kvpool.keys import KeyArray, KVLayout, Namespace, block_keys
from seer.kvpool.local import LocalPool
from seer.kvpool.node_pool import FarReads, NodePool, take_far_reads
from seer.kvpool.none import NonePool

BLOCK_BYTES = 4096
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=16, dtype="float32", block_size=4)


def keys_of(num_blocks: int, weights_version: int = 1) -> KeyArray:
    namespace = Namespace(model="m", weights_version=weights_version, layout=LAYOUT)
    return block_keys(namespace, np.arange(num_blocks * LAYOUT.block_size))


def blocks_of(num_blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, BLOCK_BYTES), dtype=np.uint8)


def nothing(num_blocks: int) -> np.ndarray:
    return np.zeros((num_blocks, BLOCK_BYTES), np.uint8)


class Nodes:
    """Two nodes, each with its near tier, over one store."""

    def __init__(self, far: LocalPool, near: list[LocalPool]) -> None:
        self.far = far
        self.one, self.two = (NodePool(own, far) for own in near)


@contextlib.contextmanager
def two_nodes(folder: Path, near_blocks: int = 16) -> Iterator[Nodes]:
    with contextlib.ExitStack() as stack:
        sizes = [64, near_blocks, near_blocks]
        far, *near = [
            stack.enter_context(a_local_pool(folder, block_bytes=BLOCK_BYTES, dram_blocks=num, ssd_blocks=0))
            for num in sizes
        ]
        yield Nodes(far, near)


def test_a_move_inside_a_node_reads_nothing_from_the_store(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as nodes:
        blocks, out = blocks_of(6), nothing(6)
        nodes.one.put_now(keys_of(6), blocks)
        before = nodes.far.stats()
        assert nodes.one.get_now(keys_of(6), out) == [True] * 6
        assert np.array_equal(out, blocks)
        assert nodes.far.stats().num_hit_dram == before.num_hit_dram
        assert take_far_reads(nodes.one) == FarReads()


def test_a_move_to_another_node_comes_from_the_store_once_and_then_from_the_node(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as nodes:
        blocks = blocks_of(6)
        nodes.one.put_now(keys_of(6), blocks)
        for expected_bytes in (6 * BLOCK_BYTES, 0):
            out = nothing(6)
            assert nodes.two.get_now(keys_of(6), out) == [True] * 6
            assert np.array_equal(out, blocks)
            assert take_far_reads(nodes.two).num_bytes == expected_bytes


def test_without_a_store_the_node_still_holds_what_it_saved(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as nodes:
        alone = NodePool(nodes.one.near, NonePool())
        assert alone.put_now(keys_of(3), blocks_of(3)) == [True] * 3
        assert alone.get_now(keys_of(3), nothing(3)) == [True] * 3


def test_a_node_whose_near_tier_is_full_reads_from_the_store(tmp_path: Path) -> None:
    with two_nodes(tmp_path, near_blocks=8) as nodes:
        blocks, out = blocks_of(32), nothing(32)
        assert nodes.one.put_now(keys_of(32), blocks, owners="a") == [True] * 32
        assert nodes.one.lookup_now(keys_of(32)) == 32
        assert nodes.one.get_now(keys_of(32), out) == [True] * 32
        assert np.array_equal(out, blocks)
        assert 0 < take_far_reads(nodes.one).num_bytes < 32 * BLOCK_BYTES


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "drop"]), st.sampled_from([0, 1]), st.integers(0, 11), st.integers(1, 3)),
    max_size=40,
)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_nothing_is_read_that_was_not_put_under_that_weights_version(
    steps: list[tuple[str, int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Blocks of a version differ from those of another; a dropped version is never read on a node that dropped it."""
    with two_nodes(tmp_path_factory.mktemp("pool"), near_blocks=8) as nodes:
        pools, dropped = (nodes.one, nodes.two), set()
        for step, node, block, version in steps:
            key, pool = keys_of(12, version)[block : block + 1], pools[node]
            content = blocks_of(12, seed=version)[block : block + 1]
            if step == "put":
                assert pool.put_now(key, content) == [version not in dropped]
            elif step == "drop":
                for one in pools:  # as the driver has every node do
                    one.drop_weights_version(version)
                dropped.add(version)
            else:
                out = nothing(1)
                (hit,) = pool.get_now(key, out)
                assert not (hit and version in dropped)
                assert not hit or np.array_equal(out, content)
