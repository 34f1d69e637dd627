# SPDX-License-Identifier: Apache-2.0
"""The default size of a pool."""

from __future__ import annotations

import shutil
from collections import namedtuple

import pytest

from seer.hosting import fleet_pool

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    free = {"shared": 64 << 30, "memory": 64 << 30}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, free["shared"]))
    monkeypatch.setattr(fleet_pool, "free_memory_bytes", lambda: free["memory"])
    return free


def test_it_holds_the_kv_of_running_requests_and_as_much_of_paused_ones(free_bytes: dict[str, int]) -> None:
    assert fleet_pool.default_pool_bytes(1 << 30, 2) == 4 << 30
    assert fleet_pool.default_pool_bytes(3 << 20, 4) == 24 << 20
    assert fleet_pool.default_pool_bytes(None, 2) == 4 * fleet_pool.UNKNOWN_KV_BYTES


@pytest.mark.parametrize("scarce", ["shared", "memory"])
def test_it_takes_at_most_half_of_what_is_free(free_bytes: dict[str, int], scarce: str) -> None:
    free_bytes[scarce] = 6 << 30
    assert fleet_pool.default_pool_bytes(1 << 30, 2) == 3 << 30
