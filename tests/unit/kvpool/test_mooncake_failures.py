# SPDX-License-Identifier: Apache-2.0
"""What the pool makes of a Mooncake library that fails: misses, and no exception in the middle of a rollout."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seer.errors import PoolError
from seer.kvpool.mooncake import MooncakePool, MooncakePoolConfig
from seer.kvpool.mooncake_servers import MooncakeServers, MooncakeServersConfig, wildcard_listeners

BLOCK_BYTES = 1000


class Store:
    """Mooncake's store in a dictionary; `failing` calls raise as the library may."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.failing: set[str] = set()
        self.marks_unknown = False

    def _may_fail(self, name: str) -> None:
        if name in self.failing:
            raise RuntimeError("std::bad_alloc")

    def register_buffer(self, pointer: int, size: int) -> int:
        return 0

    def batch_is_exist(self, named: list[str]) -> list[int]:
        self._may_fail("batch_is_exist")
        return [-1 if self.marks_unknown and name.startswith("dropped/") else int(name in self.held) for name in named]

    def batch_put_from(self, named: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        self._may_fail("batch_put_from")
        for name, pointer, size in zip(named, pointers, sizes, strict=True):
            self.held.setdefault(name, ctypes.string_at(pointer, size))
        return [0] * len(named)

    def batch_get_into(self, named: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        self._may_fail("batch_get_into")
        answers = []
        for name, pointer in zip(named, pointers, strict=True):
            data = self.held.get(name)
            answers.append(-704 if data is None else len(data))
            ctypes.memmove(pointer, data or b"", len(data or b""))
        return answers

    def batch_remove(self, named: list[str], force: bool) -> list[int]:
        self._may_fail("batch_remove")
        return [0 if self.held.pop(name, None) is not None else -704 for name in named]

    def put(self, name: str, data: bytes) -> int:
        self._may_fail("put")
        self.held[name] = data
        return 0

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        gone = [name for name in self.held if name.startswith(pattern[1:])]
        for name in gone:
            del self.held[name]
        return len(gone)

    def close(self) -> None:
        pass


class PoolOverStore(MooncakePool):
    """Without Mooncake."""

    def __init__(self, store: Store, **settings: Any) -> None:
        self.made = store
        bounds: dict[str, Any] = {"deadline_s": 30.0, "retry_s": 0.0} | settings
        super().__init__(MooncakePoolConfig(master_address="x:1", block_bytes=BLOCK_BYTES, **bounds))

    def _connect(self) -> Any:
        return self.made


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def pool(store: Store) -> Iterator[MooncakePool]:
    with PoolOverStore(store) as opened:
        yield opened


def keys_of(num: int, weights_version: int = 1) -> np.ndarray:
    keys = np.zeros((num, 32), np.uint8)
    keys[:, 0], keys[:, 31] = weights_version, np.arange(num)
    return keys


def blocks_of(num: int) -> np.ndarray:
    return np.random.default_rng(num).integers(0, 256, (num, BLOCK_BYTES), dtype=np.uint8)


def test_a_call_that_raises_is_a_counted_miss_and_the_pool_serves_again(store: Store, pool: MooncakePool) -> None:
    keys, blocks, out = keys_of(3), blocks_of(3), np.zeros((3, BLOCK_BYTES), np.uint8)
    store.failing = {"batch_is_exist", "batch_put_from", "batch_get_into", "batch_remove"}
    assert pool.lookup_now(keys) == 0
    assert pool.put_now(keys, blocks, "a") == [False] * 3
    store.failing -= {"batch_is_exist"}
    for _ in range(3):  # more often than there is staging memory
        assert pool.put_now(keys, blocks, "a") == [False] * 3
        assert pool.get_now(keys, out) == [False] * 3
    assert pool.troubles().num_failed == 8
    store.failing = set()
    assert pool.put_now(keys, blocks, "a") == [True] * 3
    assert pool.get_now(keys, out) == [True] * 3
    assert np.array_equal(out, blocks)
    store.failing = {"batch_remove"}
    assert pool.free("a") == 0


def test_a_purge_that_fails_or_hangs_is_a_pool_error(store: Store) -> None:
    """Callers let a run go on without a purge, and know it by this error."""
    hang = threading.Event()
    with PoolOverStore(store, deadline_s=0.01) as pool:
        store.failing = {"put"}
        with pytest.raises(PoolError, match="std::bad_alloc"):
            pool.drop_weights_version(1)
        store.failing = set()
        store.put = lambda name, data: int(hang.wait(60))  # type: ignore[method-assign]
        with pytest.raises(PoolError, match="took longer than"):
            pool.drop_weights_version(1)
        hang.set()


def test_no_block_is_put_while_it_is_not_known_whether_its_weights_version_was_dropped(
    store: Store, pool: MooncakePool
) -> None:
    keys, blocks = keys_of(2), blocks_of(2)
    with PoolOverStore(store) as other:
        other.drop_weights_version(1)
    store.marks_unknown = True
    assert pool.put_now(keys, blocks) == [False, False]
    assert pool.troubles().num_failed == 1
    store.marks_unknown = False
    assert pool.put_now(keys, blocks) == [False, False]
    assert pool.put_now(keys_of(2, weights_version=2), blocks) == [True, True]


def a_dead_process() -> subprocess.Popen[bytes]:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    return dead


class DyingServers(MooncakeServers):
    """A master that ends at once; its second and third start fail."""

    num_starts = 0

    def _start_master(self) -> None:
        self.num_starts += 1
        if self.num_starts == 2:
            raise PoolError("the Mooncake master did not listen")
        if self.num_starts == 3:
            raise OSError("no process can be made")
        self._master = a_dead_process()


def test_a_server_that_cannot_be_started_again_yet_is_tried_at_the_next_look(tmp_path: Path) -> None:
    with DyingServers(MooncakeServersConfig(dram_bytes=0, log_dir=str(tmp_path))) as servers:
        said = [servers.watch()[1:] for _ in range(3)]
    assert [note.split(":")[0] for notes in said for note in notes] == [
        "the Mooncake master did not listen",
        "no process can be made",
    ]
    assert servers.num_starts == 4


def test_a_process_that_has_ended_listens_nowhere() -> None:
    assert wildcard_listeners(a_dead_process().pid) == []


def test_requests_that_went_elsewhere_leave_nothing_when_their_weights_version_ends(pool: MooncakePool) -> None:
    for request in range(5):
        assert pool.put_now(keys_of(2), blocks_of(2), str(request)) == [True, True]
    assert pool.put_now(keys_of(2, weights_version=2), blocks_of(2), "5") == [True, True]
    pool.pin("6", keys_of(1, weights_version=3))
    pool.drop_weights_version(1)
    assert set(pool._pins) == {"5"}
