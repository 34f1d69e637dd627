# SPDX-License-Identifier: Apache-2.0
"""The sharp edges of Mooncake, met one by one on real servers. Skipped where the extra is not installed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pools import needs_mooncake
from seer.errors import ConfigError, DeadlineExceeded, PoolError
from seer.kvpool.mooncake import MooncakePool, MooncakePoolConfig
from seer.kvpool.mooncake_metrics import MooncakeTiers, parse_tiers, read_tiers
from seer.kvpool.mooncake_record import FOOTER_BYTES, names, seal
from seer.kvpool.mooncake_servers import MooncakeServers, MooncakeServersConfig, wildcard_listeners
from seer.kvpool.serve import pid_started

BLOCK_BYTES = 32 << 10


@pytest.fixture
def servers() -> Iterator[MooncakeServers]:
    needs_mooncake()
    with MooncakeServers(MooncakeServersConfig(dram_bytes=64 << 20, client_ttl_s=3)) as running:
        yield running


@pytest.fixture
def pool(servers: MooncakeServers) -> Iterator[MooncakePool]:
    config = MooncakePoolConfig(
        owner_address=servers.owner_address, block_bytes=BLOCK_BYTES, deadline_s=2.0, retry_s=60.0
    )
    with MooncakePool(config) as opened:
        yield opened


def keys_of(num: int, weights_version: int = 1) -> np.ndarray:
    keys = np.random.default_rng(weights_version).integers(0, 256, (num, 32), dtype=np.uint8)
    keys[:, :8] = np.frombuffer(weights_version.to_bytes(8, "little"), np.uint8)
    return keys


def blocks_of(num: int) -> np.ndarray:
    return np.random.default_rng(num).integers(0, 256, (num, BLOCK_BYTES), dtype=np.uint8)


def test_bytes_that_are_not_what_was_put_are_refused_counted_and_dropped(pool: MooncakePool) -> None:
    keys, blocks, out = keys_of(3), blocks_of(3), np.zeros((3, BLOCK_BYTES), np.uint8)
    named, row = names(keys), np.zeros(BLOCK_BYTES + FOOTER_BYTES, np.uint8)
    assert seal(row, blocks[0], bytes(keys[0])) == row.nbytes
    good = row.tobytes()
    flipped = bytearray(good)
    flipped[1234] ^= 4
    assert pool._store.put(named[0], bytes(flipped)) == 0
    assert pool._store.put(named[1], good) == 0, "a good block, under another block's name"
    assert pool._store.put(named[2], blocks[2].tobytes()) == 0, "a block nobody signed"

    assert pool.get_now(keys, out) == [False, False, False]
    assert pool.stats().num_corrupt == 2, "the third has another size: a miss like any other"
    assert pool.lookup_now(keys) == 0
    assert pool.put_now(keys[:1], blocks[:1]) == [True]
    assert pool.get_now(keys[:1], out[:1]) == [True]
    assert np.array_equal(out[0], blocks[0])


def test_with_the_master_gone_every_call_is_a_bounded_miss(servers: MooncakeServers, pool: MooncakePool) -> None:
    keys, blocks = keys_of(4), blocks_of(4)
    assert pool.put_now(keys, blocks, "a") == [True] * 4
    servers.kill_master()
    start = time.monotonic()
    out = np.full((4, BLOCK_BYTES), 9, np.uint8)
    assert pool.lookup_now(keys) == 0
    for _ in range(50):
        assert pool.put_now(keys_of(4, weights_version=2), blocks) == [False] * 4
        assert pool.get_now(keys_of(4, weights_version=3), out) == [False] * 4
    assert pool.free("a") == 0
    with pytest.raises((PoolError, DeadlineExceeded)):
        pool.drop_weights_version(1)
    # One call may wait its deadline; after it the breaker answers. Mooncake itself would take 4.3 s for each.
    assert time.monotonic() - start < 20
    assert pool.stats().num_failed > 100


def test_a_dead_owner_costs_its_blocks_and_never_gives_wrong_ones(servers: MooncakeServers, pool: MooncakePool) -> None:
    keys, blocks = keys_of(8), blocks_of(8)
    assert pool.put_now(keys, blocks) == [True] * 8
    servers.kill_owner()
    out = np.zeros((8, BLOCK_BYTES), np.uint8)
    for hit, got, want in zip(pool.get_now(keys, out), out, blocks, strict=True):
        assert not hit or np.array_equal(got, want)


def test_an_owner_is_not_restarted_before_the_master_has_forgotten_it(servers: MooncakeServers) -> None:
    servers.watch()
    before = servers.pids["owner"]
    servers.kill_owner()
    assert "starting it again in" in servers.watch()[0]
    assert servers.pids["owner"] == before
    deadline = time.monotonic() + 30
    while servers.pids["owner"] == before:
        assert time.monotonic() < deadline, "the owner was never restarted"
        servers.watch()
        time.sleep(0.1)
    config = MooncakePoolConfig(owner_address=servers.owner_address, block_bytes=BLOCK_BYTES, deadline_s=10)
    with MooncakePool(config) as pool:
        assert pool.put_now(keys_of(1), blocks_of(1)) == [True]


def test_listeners_on_every_interface_are_found(servers: MooncakeServers) -> None:
    assert wildcard_listeners(servers.pids["master"]) == [], "the master binds where it was told"
    assert wildcard_listeners(servers.pids["owner"]) != [], "if this fails Mooncake got better: update the docs"


def test_what_does_not_fit_in_dram_goes_to_ssd_and_what_comes_back_is_intact(tmp_path: Path) -> None:
    """A working set half as large again as DRAM: the least that Mooncake spills is a bucket of many blocks.

    Reading from SSD moves blocks to DRAM, and so others out of it. On a busy machine a read may take longer than the
    lease of 200 ms here, and fail however often it is tried: a pool may miss a block; it must not return a wrong one.
    """
    needs_mooncake()
    block_bytes, num, batch = 1 << 20, 768, 8
    keys = keys_of(num)
    sizes = MooncakeServersConfig(
        dram_bytes=512 << 20, ssd_bytes=2 << 30, ssd_dir=str(tmp_path), client_ttl_s=5, lease_ms=200
    )

    def block(number: int) -> np.ndarray:
        return np.full(block_bytes, number % 251, np.uint8)

    with MooncakeServers(sizes) as servers:
        config = MooncakePoolConfig(
            owner_address=servers.owner_address,
            metrics_address=servers.metrics_address,
            block_bytes=block_bytes,
            deadline_s=10.0,
        )
        with MooncakePool(config) as pool:
            deadline = time.monotonic() + 120
            for first in range(0, num, batch):
                part = range(first, first + batch)
                while not all(pool.put_now(keys[first : first + batch], [block(i) for i in part])):
                    assert time.monotonic() < deadline, f"puts are refused for good at block {first}"
                    time.sleep(0.1)  # all of DRAM is taken until the owner's next heartbeat
            stats = pool.stats()
            assert stats.num_blocks >= num
            assert 0 < stats.dram_bytes <= stats.dram_capacity_bytes
            assert stats.ssd_bytes > 64 * block_bytes
            out = np.zeros((batch, block_bytes), np.uint8)
            missing = []
            for first in range(0, num, batch):
                held = pool.get_now(keys[first : first + batch], out)
                missing += [number for number, is_held in enumerate(held, first) if not is_held]
                for number, got, is_held in zip(range(first, num), out, held, strict=False):
                    assert not is_held or np.array_equal(got, block(number)), f"block {number} came back wrong"
            said = {number: pool._store.is_exist(names(keys)[number]) for number in missing}
            assert len(missing) <= num // 100, f"blocks that are missing, and what the master says of them: {said}"


class LateStore:
    """Mooncake, on which the reads of some blocks outlast their lease so many times."""

    def __init__(self, store: Any, late: dict[str, int]) -> None:
        self._store, self._late = store, late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_get_into(self, named: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        answers = list(self._store.batch_get_into(named, pointers, sizes))
        for i, name in enumerate(named):
            if self._late.get(name, 0):
                self._late[name] -= 1
                answers[i] = -707
        return answers


def test_a_read_that_outlasts_the_lease_is_tried_again(pool: MooncakePool) -> None:
    keys, blocks, out = keys_of(4), blocks_of(4), np.zeros((4, BLOCK_BYTES), np.uint8)
    assert pool.put_now(keys, blocks) == [True] * 4
    named = names(keys)
    pool._store = LateStore(pool._store, {named[1]: 1, named[2]: 3, named[3]: 99})
    assert pool.get_now(keys, out) == [True, True, True, False]
    assert np.array_equal(out[:3], blocks[:3])
    assert pool.stats().num_failed == 1


def test_with_a_lease_of_a_millisecond_every_read_is_a_counted_miss() -> None:
    """What Mooncake does with a read that outlasts its lease: it fails for blocks that are there."""
    needs_mooncake()
    with MooncakeServers(MooncakeServersConfig(dram_bytes=64 << 20, client_ttl_s=3, lease_ms=1)) as servers:
        config = MooncakePoolConfig(owner_address=servers.owner_address, block_bytes=1 << 20, deadline_s=5.0)
        with MooncakePool(config) as pool:
            keys, out = keys_of(8), np.zeros((8, 1 << 20), np.uint8)
            assert all(pool.put_now(keys, np.ones((8, 1 << 20), np.uint8)))
            held = pool.get_now(keys, out)
            assert pool.stats().num_failed == held.count(False)
            assert pool.lookup_now(keys) == 8


def test_a_metrics_page_is_read_and_a_silent_master_is_no_error() -> None:
    page = (
        "# TYPE master_allocated_bytes gauge\nmaster_allocated_bytes 5\nmaster_total_capacity_bytes 9\n"
        "master_allocated_file_size_bytes 7\nmaster_key_count 2\nother 1\n"
    )
    assert parse_tiers(page) == MooncakeTiers(num_blocks=2, dram_bytes=5, dram_capacity_bytes=9, ssd_bytes=7)
    assert parse_tiers(page + "other_s NaN\n") == parse_tiers(page)
    assert parse_tiers("master_key_count 1.2e+06\n") == MooncakeTiers(num_blocks=1_200_000)
    for broken in ("<html>no such page</html>", "master_key_count NaN\n", "master_key_count{\n"):
        assert parse_tiers(broken) is None
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert read_tiers(f"127.0.0.1:{closed.getsockname()[1]}", 1.0) is None


def test_stopping_leaves_no_process(servers: MooncakeServers) -> None:
    pids = servers.pids
    servers.stop()
    assert servers.pids == {}
    assert [pid_started(pid) for pid in pids.values()] == [None, None]


@pytest.mark.parametrize(
    ("asked", "devices", "used"),
    [("auto", None, "tcp"), ("auto", [], "tcp"), ("auto", ["mlx5_0"], "rdma"), ("tcp", ["mlx5_0"], "tcp")],
)
def test_an_owner_is_launched_with_rdma_where_the_machine_has_a_device_and_it_is_not_refused(
    asked: Any, devices: list[str] | None, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the processes are given; none is started."""
    if devices is not None:
        for name in ("", *devices):
            (tmp_path / "infiniband" / name).mkdir()
    launched: dict[str, list[str]] = {}

    def launch(servers: MooncakeServers, program: str, flags: list[str], environment: dict[str, str]) -> Any:
        launched[program] = flags
        return SimpleNamespace(pid=0, poll=lambda: 0)

    monkeypatch.setattr("seer.kvpool.mooncake_servers.RDMA_DEVICES", tmp_path / "infiniband")
    monkeypatch.setattr(MooncakeServers, "_spawn", launch)
    monkeypatch.setattr(MooncakeServers, "_wait_ready", lambda *_: None)
    with MooncakeServers(MooncakeServersConfig(dram_bytes=16 << 20, protocol=asked)):
        pass
    assert f"--protocol={used}" in launched["mooncake_client"]
    assert not [flag for flag in launched["mooncake_master"] if "protocol" in flag]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="protocol='udp'"):
        MooncakeServersConfig(dram_bytes=1 << 30, protocol="udp")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="below 16 MiB"):
        MooncakeServersConfig(dram_bytes=1)
    with pytest.raises(ConfigError, match="not a folder"):
        MooncakeServersConfig(dram_bytes=1 << 30, ssd_bytes=1 << 30, ssd_dir="/nowhere")
    with pytest.raises(ConfigError, match="too small over an SSD"):
        MooncakeServersConfig(dram_bytes=64 << 20, ssd_bytes=1 << 30, ssd_dir="/tmp")
    with pytest.raises(ConfigError, match="either owner_address"):
        MooncakePoolConfig(block_bytes=1)
    with pytest.raises(ConfigError, match="too small"):
        MooncakePoolConfig(owner_address="x", block_bytes=0)
