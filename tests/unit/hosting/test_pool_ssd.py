# SPDX-License-Identifier: Apache-2.0
"""The SSD tier of a rollout's pool: its size, its private folder, and its end."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from seer.config import PoolConfig
from seer.errors import ConfigError
from seer.hosting.fleet_pool import FleetPool
from seer.hosting.pool_ssd import SsdTier, ssd_tier

MIB = 1 << 20
Usage = namedtuple("Usage", "total used free")


def slabs(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.slab"))


def a_pool(folder: Path, ssd_bytes: int = 2 * MIB) -> FleetPool:
    return FleetPool.local(block_bytes=4096, block_size=16, dram_bytes=MIB, ssd=SsdTier(folder, ssd_bytes))


def test_its_default_size_is_four_times_the_dram_and_at_most_half_of_the_free_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PoolConfig(ssd_dir=tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 1 << 40))
    assert ssd_tier(config, 10 * MIB) == SsdTier(tmp_path, 40 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 30 * MIB))
    assert ssd_tier(config, 10 * MIB) == SsdTier(tmp_path, 15 * MIB)
    assert ssd_tier(PoolConfig(ssd_dir=tmp_path, ssd_bytes=MIB), 10 * MIB) == SsdTier(tmp_path, MIB)
    assert ssd_tier(PoolConfig(), 10 * MIB) is None


def test_its_file_is_bounded_private_and_gone_after_the_pool(tmp_path: Path) -> None:
    pool = a_pool(tmp_path)
    pool.start()
    (slab,) = slabs(tmp_path)
    status = slab.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == 2 * MIB + 4096  # and a page that says which pool it belongs to
    assert all(stat.S_IMODE(parent.stat().st_mode) == 0o700 for parent in slab.parents if tmp_path in parent.parents)
    stats = pool.stats()
    assert stats is not None
    assert stats.ssd_capacity_bytes == 2 * MIB
    pool.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_pool_that_cannot_be_made_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, 1 << 50)
    pool = FleetPool.local(block_bytes=1 << 30, block_size=16, dram_bytes=4 << 30, ssd=tier)
    with pytest.raises(Exception, match="does not fit"):
        pool.start()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_a_killed_driver_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from seer.hosting.fleet_pool import FleetPool;"
        "from seer.hosting.pool_ssd import SsdTier;"
        "FleetPool.local(block_bytes=4096, block_size=16, dram_bytes=1 << 20,"
        " ssd=SsdTier(Path(sys.argv[1]), 1 << 20)).start(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 9
    (left,) = slabs(tmp_path)
    # A reboot empties shared memory, so that nothing there names the slab; the folder's own lock must do.
    pool = a_pool(tmp_path)
    assert pool._ssd is not None
    pool._ssd.open()
    assert not left.exists()


def test_a_tier_in_use_is_not_removed_by_another_driver(tmp_path: Path) -> None:
    first, second = a_pool(tmp_path), a_pool(tmp_path)
    first.start()
    second.start()
    assert len(slabs(tmp_path)) == 2
    second.close()
    assert len(slabs(tmp_path)) == 1
    first.close()


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ssd_bytes is set and pool\.ssd_dir is not"):
        PoolConfig(ssd_bytes=MIB)
    with pytest.raises(ConfigError, match="the pool is off"):
        PoolConfig(ssd_dir=tmp_path, memory_bytes=0)
    with pytest.raises(ConfigError, match="the pool is 'mooncake'"):
        PoolConfig(ssd_dir=tmp_path, backend="mooncake")
    with pytest.raises(ConfigError, match="is not a folder"):
        ssd_tier(PoolConfig(ssd_dir=tmp_path / "nowhere"), MIB)
    with pytest.raises(ConfigError, match="ssd_bytes=0"):
        PoolConfig(ssd_dir=tmp_path, ssd_bytes=0)
    assert os.listdir(tmp_path) == []
