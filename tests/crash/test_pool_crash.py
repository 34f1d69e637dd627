# SPDX-License-Identifier: Apache-2.0
"""Processes that use the local pool are killed; what was acknowledged stays. The long form is
pool_torture.py.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import uuid
from pathlib import Path

import numpy as np
import pool_torture
import pytest

from seer.errors import PoolError
from seer.kvpool import _arena
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig, find_pools

BLOCK_BYTES = 8 << 10
DEADLINE_S = 60


def key_of(block: int, weights_version: int = 1) -> bytes:
    return weights_version.to_bytes(8, "little") + block.to_bytes(8, "little") + bytes(16)


def keys_of(blocks: range) -> list[bytes]:
    return [key_of(b) for b in blocks]


def block_of(block: int) -> np.ndarray:
    return np.random.default_rng(block).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


@pytest.fixture
def config(tmp_path: Path) -> LocalPoolConfig:
    return LocalPoolConfig(
        block_bytes=BLOCK_BYTES,
        dram_bytes=8 * BLOCK_BYTES,
        ssd_bytes=64 * BLOCK_BYTES,
        ssd_dir=str(tmp_path),
        dram_dir=str(tmp_path),
        name=uuid.uuid4().hex,
        keeper=False,
        populate=False,
    )


def do_everything(config: LocalPoolConfig, point: str, after: int) -> None:
    """One of each operation over and over; dies at the point on the way."""
    pool = LocalPool.attach(config.name, config.dram_dir, keeper=False, populate=False)
    _arena.crash_at(point, after)
    arena = pool._open_arena()
    while True:
        blocks = range(100, 112)
        pool.put_now(keys_of(blocks), [block_of(b) for b in blocks], "mine")
        arena.spill(8, False)
        pool.get_now(keys_of(blocks), np.zeros((12, BLOCK_BYTES), np.uint8))
        arena.spill(4, False)
        arena.promote(b"".join(keys_of(range(12))))
        pool.free("mine")
        pool.put_now([key_of(0, weights_version=2), key_of(1, weights_version=2)], [block_of(0), block_of(1)])
        pool.drop_weights_version(2)
        arena.rebuild()
        if point == "dropping":  # a weights version can be dropped with effect only once
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("point", _arena.crash_points())
def test_nothing_acknowledged_is_lost_at_any_point_of_death(config: LocalPoolConfig, point: str, after: int) -> None:
    if point == "dropping":
        after = min(after, 1)
    with LocalPool(config) as pool:
        mine = range(24)  # three times what DRAM holds
        assert all(pool.put_now(keys_of(mine), [block_of(b) for b in mine], "keep"))

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["numpy", "seer.kvpool.local", "test_pool_crash"])
        process = context.Process(target=do_everything, args=(config, point, after))
        process.start()
        process.join(timeout=DEADLINE_S)
        assert process.exitcode == -signal.SIGKILL, "the process did not reach the point"

        out = np.zeros((len(mine), BLOCK_BYTES), np.uint8)
        assert pool.get_now(keys_of(mine), out) == [True] * len(mine)
        assert np.array_equal(out, np.stack([block_of(b) for b in mine]))
        arena = pool._open_arena()
        arena.reap()
        assert arena.problems() == []
        assert arena.stats()["num_claims"] == 0, "what the dead process was copying was not taken back"
        # Its half-done work left no room behind either: all slots can be used.
        rest = range(200, 200 + 72 - 24 - 12)
        assert all(pool.put_now(keys_of(rest), [block_of(b) for b in rest]))
        assert pool.lookup_now(keys_of(mine)) == len(mine)
        pool.close(remove=True)


def test_random_kills_lose_nothing(tmp_path: Path) -> None:
    outcome = pool_torture.torture(kills=60, seed=int.from_bytes(os.urandom(2), "little"), folder=tmp_path, budget_s=60)
    assert outcome.problems == [], outcome
    assert outcome.kills >= 10, outcome
    assert outcome.reads > 1000, outcome


def put_and_die(config: LocalPoolConfig, blocks: range) -> None:
    pool = LocalPool(config)
    assert all(pool.put_now(keys_of(blocks), [block_of(b) for b in blocks]))
    os.kill(os.getpid(), signal.SIGKILL)


def run_to_death(config: LocalPoolConfig, blocks: range) -> None:
    process = multiprocessing.get_context("spawn").Process(target=put_and_die, args=(config, blocks))
    process.start()
    process.join(timeout=DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL


def test_the_same_run_finds_its_blocks_after_all_its_processes_died(config: LocalPoolConfig) -> None:
    run_to_death(config, range(20))
    with LocalPool(config) as pool:
        assert not pool.created
        out = np.zeros((20, BLOCK_BYTES), np.uint8)
        assert pool.get_now(keys_of(range(20)), out) == [True] * 20
        assert np.array_equal(out, np.stack([block_of(b) for b in range(20)]))
        pool.close(remove=True)


def test_the_arena_of_a_dead_run_is_reclaimed(config: LocalPoolConfig) -> None:
    run_to_death(config, range(20))
    found = find_pools(config.dram_dir)
    assert [(p.name, p.stale) for p in found] == [(config.name, True)]

    fields = {f: getattr(config, f) for f in config.__slots__}
    with LocalPool(LocalPoolConfig(**{**fields, "run": "another"})) as pool:
        assert pool.created
        assert pool.lookup_now(keys_of(range(20))) == 0
        with pytest.raises(PoolError, match="in use by run 'another'"):
            LocalPool(config)
        pool.close(remove=True)
    assert find_pools(config.dram_dir) == []
