# SPDX-License-Identifier: Apache-2.0
"""What only the local pool has: two tiers, bounds, files, house keeping, refusals."""

from __future__ import annotations

import multiprocessing
import os
import resource
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from seer.errors import ConfigError, PoolError
from seer.kvpool import _arena, local_files
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig, find_pools

BLOCK_BYTES = 16 << 10


def a_config(tmp_path: Path, *, dram: int = 8, ssd: int = 32, **more: object) -> LocalPoolConfig:
    fields: dict[str, object] = {
        "block_bytes": BLOCK_BYTES,
        "dram_bytes": dram * BLOCK_BYTES,
        "ssd_bytes": ssd * BLOCK_BYTES,
        "ssd_dir": str(tmp_path) if ssd else "",
        "dram_dir": str(tmp_path),
        "name": uuid.uuid4().hex,
        "keeper": False,
        "populate": False,
    }
    return LocalPoolConfig(**{**fields, **more})  # type: ignore[arg-type]


def keys_of(num: int, weights_version: int = 1) -> list[bytes]:
    return [weights_version.to_bytes(8, "little") + n.to_bytes(8, "little") + bytes(16) for n in range(num)]


def blocks_of(num: int) -> np.ndarray:
    return np.random.default_rng(num).integers(0, 256, (num, BLOCK_BYTES), dtype=np.uint8)


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def wait_until(fact: Callable[[], bool], what: str, limit_s: float = 20) -> None:
    deadline = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s} s"
        time.sleep(0.005)


def test_a_working_set_four_times_the_dram_comes_back_intact(tmp_path: Path) -> None:
    with LocalPool(a_config(tmp_path, dram=16, ssd=64, keeper=True)) as pool:
        keys, blocks = keys_of(64), blocks_of(64)
        assert all(pool.put_now(keys, blocks))
        for _ in range(3):
            out = np.zeros_like(blocks)
            assert all(pool.get_now(keys, out))
            assert np.array_equal(out, blocks)
        stats = pool.stats()
        assert stats.num_blocks == 64
        assert stats.num_evicted == stats.num_corrupt == stats.num_miss == 0
        assert stats.num_spilled >= 48
        assert stats.num_hit_ssd > 0
        assert stats.dram_bytes <= stats.dram_capacity_bytes
        pool.close(remove=True)


def test_the_least_recently_used_block_is_spilled_and_then_evicted_first(tmp_path: Path) -> None:
    with LocalPool(a_config(tmp_path, dram=4, ssd=4)) as pool:
        keys, blocks, arena = keys_of(9), blocks_of(9), pool._open_arena()
        pool.put_now(keys[:4], blocks[:4])
        pool.get_now(keys[:1], blocks[:1].copy())  # 0 is now the most recent of 0..3
        pool.put_now(keys[4:5], blocks[4:5])
        assert arena.locate(keys[1])["dram_offset"] is None  # type: ignore[index]
        assert arena.locate(keys[0])["dram_offset"] is not None  # type: ignore[index]
        pool.put_now(keys[5:8], blocks[5:8])
        assert pool.stats().num_evicted == 0
        pool.put_now(keys[8:9], blocks[8:9])
        assert pool.stats().num_evicted == 1
        assert arena.locate(keys[1]) is None, "the oldest block had to go"
        pool.close(remove=True)


def test_a_pool_full_of_pinned_blocks_refuses_and_keeps_them(tmp_path: Path) -> None:
    with LocalPool(a_config(tmp_path, dram=4, ssd=4)) as pool:
        keys, blocks = keys_of(10), blocks_of(10)
        assert pool.put_now(keys[:8], blocks[:8], "a") == [True] * 8
        assert pool.put_now(keys[8:], blocks[8:]) == [False] * 2
        assert pool.lookup_now(keys) == 8
        assert pool.stats().num_refused == 2
        pool.free("a")
        assert pool.put_now(keys[8:], blocks[8:]) == [True] * 2
        pool.close(remove=True)


def test_reading_from_ssd_promotes_where_a_slot_is_to_spare(tmp_path: Path) -> None:
    with LocalPool(a_config(tmp_path, dram=8, ssd=16)) as pool:
        keys, blocks = keys_of(8), blocks_of(8)
        pool.put_now(keys, blocks)
        assert pool._open_arena().spill(8, False) == 8
        pool.get_now(keys, np.zeros_like(blocks))
        assert pool.stats().num_promoted > 0
        assert pool.stats().num_hit_ssd == 8
        assert pool.stats().num_prefetched == 0, "kept after a hit is not prefetched"
        pool.get_now(keys[:2], np.zeros_like(blocks[:2]))
        assert pool.stats().num_hit_dram == 2
        pool.close(remove=True)


def test_prefetch_brings_blocks_to_dram_in_the_background(tmp_path: Path) -> None:
    with LocalPool(a_config(tmp_path, dram=8, ssd=32)) as pool:
        keys, blocks = keys_of(16), blocks_of(16)
        pool.put_now(keys, blocks)
        assert pool._open_arena().locate(keys[0])["dram_offset"] is None  # type: ignore[index]
        pool.prefetch(keys[:4])
        wait_until(lambda: pool.stats().num_prefetched == 4, "promotion")
        assert pool.stats().num_promoted == 4
        assert all(pool._open_arena().locate(k)["dram_offset"] is not None for k in keys[:4])  # type: ignore[index]
        assert pool.stats().num_evicted == 0
        pool.close(remove=True)


def test_the_keeper_makes_room_before_it_is_needed(tmp_path: Path) -> None:
    with LocalPool(a_config(tmp_path, dram=64, ssd=128, keeper=True)) as pool:
        pool.put_now(keys_of(64), blocks_of(64))
        wait_until(lambda: pool._open_arena().stats()["free_dram"] >= 8, "spilling by the keeper")
        assert pool.lookup_now(keys_of(64)) == 64
        pool.close(remove=True)


def test_the_keeper_never_evicts(tmp_path: Path) -> None:
    with LocalPool(a_config(tmp_path, dram=16, ssd=0, keeper=True)) as pool:
        pool.put_now(keys_of(16), blocks_of(16))
        pool._open_arena().keep(0.0)
        assert pool.lookup_now(keys_of(16)) == 16
        pool.close(remove=True)


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        pool = LocalPool(a_config(tmp_path))
    finally:
        os.umask(old)
    with pool:
        (folder,) = tmp_path.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {path.suffix for path in folder.iterdir()} == {".arena", ".json", ".lock", ".slab"}
        for path in folder.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        pool.close(remove=True)


def test_an_arena_others_can_read_is_not_adopted(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    with LocalPool(config) as pool:
        os.chmod(pool._files.arena, 0o644)
        with pytest.raises(PoolError, match="only this user"):
            LocalPool.attach(config.name, config.dram_dir)
        pool.close(remove=True)


def test_closing_with_remove_leaves_no_file(tmp_path: Path) -> None:
    LocalPool(a_config(tmp_path)).close(remove=True)
    assert files_in(tmp_path) == []


def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PoolError, match="is not a folder"):
        LocalPool(a_config(tmp_path, ssd_dir=str(tmp_path / "missing")))
    with monkeypatch.context() as patch:
        patch.setattr(local_files, "_free_bytes", lambda folder: 1 << 20)
        with pytest.raises(PoolError, match="does not fit"):
            LocalPool(a_config(tmp_path, ssd=1000))
    with pytest.raises(ConfigError, match="blocks in one tier"):
        a_config(tmp_path, ssd=1 << 34)
    with pytest.raises(PoolError, match="bytes of memory"):
        LocalPool(a_config(tmp_path, dram=1 << 23))
    with pytest.raises(PoolError, match="no pool named"):
        LocalPool.attach("absent", str(tmp_path))
    with pytest.raises(ConfigError, match="less than 4 blocks"):
        a_config(tmp_path, dram=1)
    with pytest.raises(ConfigError, match="ssd_dir is not"):
        a_config(tmp_path, ssd_dir="")
    with pytest.raises(ConfigError, match="pool name"):
        a_config(tmp_path, name="a/b")
    assert {p.suffix for p in files_in(tmp_path)} <= {".lock"}, "a refusal left files behind"


def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, for whom no mode is read-only; what is checked is what access() would say.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PoolError, match="read-only"):
        LocalPool(a_config(tmp_path))


def test_a_disk_that_fills_up_between_the_check_and_the_reservation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "_free_bytes", lambda folder: 1 << 62)
    with pytest.raises(PoolError, match=r"cannot reserve .* SSD file"):
        LocalPool(a_config(tmp_path, block_bytes=1 << 28, dram_bytes=1 << 30, ssd_bytes=1 << 51))
    assert {p.suffix for p in files_in(tmp_path)} <= {".lock"}


def test_a_repair_leaves_the_copies_under_way_alone(tmp_path: Path) -> None:
    """While one client copies a block in, another rebuilds the index and takes whatever slot looks free."""
    size, caught = 16 << 20, 0
    config = a_config(tmp_path, block_bytes=size, dram_bytes=4 * size, ssd_bytes=0, ssd_dir="", populate=True)
    one, two = np.full(size, 1, np.uint8), np.full(size, 2, np.uint8)
    out = np.empty_like(one)
    with LocalPool(config) as writer, LocalPool(config) as other, ThreadPoolExecutor(1) as thread:
        arena, deadline = other._open_arena(), time.monotonic() + 60
        for number in range(10_000):
            assert time.monotonic() < deadline, "no copy was caught under way"
            keys = [n.to_bytes(32, "little") for n in (2 * number, 2 * number + 1)]
            put = thread.submit(writer.put_now, keys[:1], [one], "a")
            while arena.stats()["num_claims"] == 0 and not put.done():
                pass
            arena.rebuild()
            in_flight = arena.stats()["num_claims"] == 1
            assert other.put_now(keys[1:], [two], "b") == [True]
            assert put.result(60) == [True], "a repair took a live writer's reservation"
            for key, block in zip(keys, (one, two), strict=True):
                assert other.get_now([key], [out]) == [True]
                assert np.array_equal(out, block)
            other.free("a")
            other.free("b")
            caught += in_flight
            if caught == 2:
                break
        writer.close(remove=True)


def test_an_ssd_that_fails_to_write_costs_no_block(tmp_path: Path) -> None:
    with LocalPool(a_config(tmp_path, dram=4, ssd=8)) as pool:
        keys, blocks = keys_of(6), blocks_of(6)
        assert all(pool.put_now(keys[:4], blocks[:4], "a"))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # from here on every write to the slab fails
        try:
            assert pool.put_now(keys[4:], blocks[4:]) == [False, False]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert pool.stats().num_failed > 0
        assert pool._open_arena().problems() == []
        out = np.zeros_like(blocks)
        assert pool.get_now(keys[:4], out[:4]) == [True] * 4
        assert np.array_equal(out[:4], blocks[:4])
        assert pool.put_now(keys[4:], blocks[4:]) == [True, True]
        pool.close(remove=True)


def test_a_slab_of_another_arena_is_refused(tmp_path: Path) -> None:
    one, two = a_config(tmp_path), a_config(tmp_path)
    with LocalPool(one) as first, LocalPool(two) as second:
        with pytest.raises(PoolError, match="does not belong"):
            _arena.Arena(str(first._files.arena), second._files.slab(), 1.0, False)
        first.close(remove=True)
        second.close(remove=True)


def test_other_sizes_are_refused_while_in_use_and_replace_it_afterwards(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    other = a_config(tmp_path, dram=16, name=config.name)
    with LocalPool(config) as pool:
        with pytest.raises(PoolError, match="other settings"):
            LocalPool(other)
        pool.close()
    with LocalPool(other) as pool:
        assert pool.created
        pool.close(remove=True)


def test_a_damaged_arena_nobody_uses_is_replaced(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    with LocalPool(config) as pool:
        arena = pool._files.arena
        pool.close()
    with open(arena, "r+b") as file:
        file.write(b"nonsense")
    assert find_pools(str(tmp_path))[0].problem
    with LocalPool(config) as pool:
        assert pool.created
        pool.close(remove=True)


def test_creating_a_pool_removes_those_of_dead_runs_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive, new = a_config(tmp_path), a_config(tmp_path), a_config(tmp_path)
    LocalPool(dead).close()
    with LocalPool(alive) as used:
        assert {p.name for p in find_pools(str(tmp_path))} == {dead.name, alive.name}, "too young to be removed"
        monkeypatch.setattr(local_files, "_STALE_AFTER_S", -1.0)
        with LocalPool(new) as pool:
            assert {p.name for p in find_pools(str(tmp_path))} == {alive.name, new.name}
            assert not any(dead.name in p.name for p in files_in(tmp_path))
            pool.close(remove=True)
        used.close(remove=True)


def test_a_process_that_forgets_to_close_ends_cleanly(tmp_path: Path) -> None:
    program = (
        "import sys; from seer.kvpool.local import LocalPool, LocalPoolConfig;"
        "config = LocalPoolConfig(name='n', block_bytes=4096, dram_bytes=1 << 20, dram_dir=sys.argv[1]);"
        "pool = LocalPool(config);"
        "pool.put_now([bytes(32)], [bytearray(10)]); pool.prefetch([bytes(32)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [p.stale for p in find_pools(str(tmp_path))] == [True]


def use_inherited(pool: LocalPool, answer: "multiprocessing.connection.Connection") -> None:  # noqa: UP037
    try:
        pool.lookup_now(keys_of(1))
        answer.send("used it")
    except PoolError as error:
        answer.send(str(error))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is what is being tested
def test_a_forked_child_is_told_to_open_its_own(tmp_path: Path) -> None:
    with LocalPool(a_config(tmp_path)) as pool:
        context = multiprocessing.get_context("fork")
        mine, theirs = context.Pipe()
        child = context.Process(target=use_inherited, args=(pool, theirs))
        child.start()
        assert mine.poll(20), "no answer"
        assert "parent process" in mine.recv()
        child.join(timeout=20)
        pool.put_now(keys_of(2), blocks_of(2))
        assert pool.lookup_now(keys_of(2)) == 2
        pool.close(remove=True)


def test_a_stuck_lock_fails_the_call_within_its_deadline(tmp_path: Path) -> None:
    """A lock that is never given back (here: overwritten by damage) is a miss, not a hang."""
    config = a_config(tmp_path, deadline_s=0.2)
    with LocalPool(config) as pool:
        pool.put_now(keys_of(2), blocks_of(2))
        start, _ = pool._open_arena().regions()["lock"]
        with open(pool._files.arena, "r+b") as file:
            file.seek(start)
            file.write((12345).to_bytes(4, "little"))  # the lock says: taken by thread 12345
        assert pool.lookup_now(keys_of(2)) == 0
        assert pool.put_now(keys_of(2), blocks_of(2)) == [False, False]
        assert pool.get_now(keys_of(2), blocks_of(2)) == [False, False]
        with pytest.raises(PoolError):
            pool.drop_weights_version(1)
        assert pool.stats().num_failed == 3
        pool.close(remove=True)


def test_latency_is_reported_for_each_call(tmp_path: Path) -> None:
    with LocalPool(a_config(tmp_path)) as pool:
        pool.put_now(keys_of(2), blocks_of(2))
        pool.get_now(keys_of(2), blocks_of(2))
        pool.lookup_now(keys_of(2))
        latency = pool.stats().latency
        assert {call: x.num_calls for call, x in latency.items()} == {"put": 1, "get": 1, "lookup": 1}
        assert all(0 < x.p50_s <= x.p99_s for x in latency.values())
        pool.close(remove=True)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4096, 100_001, 1 << 20])
def test_the_checksum_is_the_same_by_instruction_and_by_table(size: int) -> None:
    block = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    target = np.zeros_like(block)
    expected = _arena.checksum(block, True)
    assert _arena.checksum(block) == expected
    assert _arena.copy_checksum(target, block) == expected
    assert np.array_equal(target, block)
    unaligned = np.zeros(size + 3, np.uint8)[3:]
    assert _arena.copy_checksum(unaligned, block) == expected
    assert np.array_equal(unaligned, block)
