# SPDX-License-Identifier: Apache-2.0
"""What the servers of verl's replicas share, by the machine that they are on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from seer.config import PoolConfig
from seer.errors import ConfigError
from seer.hosting.ray.pool import NodesPool
from seer.integrations.verl import shared_services
from seer.integrations.verl.engine_settings import EngineNeeds
from seer.integrations.verl.settings import VerlSettings
from seer.integrations.verl.shared_services import Services
from seer.machine.addresses import LOOPBACK

NEEDS = EngineNeeds(block_bytes=4096, block_size=16, num_ranks=1, drafts=False)


class Stores:
    """Stands in for the agents on the machines."""

    closed = False

    def __init__(self, pool: NodesPool) -> None:
        assert pool.node_bytes == 1 << 20

    async def start(self) -> None:
        """Nothing runs."""

    async def way_in(self, node: str) -> dict[str, str]:
        return {"owner_address": f"{node}:1"}

    async def close(self) -> None:
        Stores.closed = True


def with_services(pool: PoolConfig, work: Callable[[Services], Awaitable[None]], num_servers: int = 2) -> None:
    async def run() -> None:
        services = Services(VerlSettings(pool=pool), num_servers, "here", LOOPBACK)
        try:
            await work(services)
        finally:
            await services.close()

    asyncio.run(run())


def test_shared_memory_is_for_the_drivers_machine_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def work(services: Services) -> None:
        here = await services.for_server(NEEDS, "here")
        there = await services.for_server(NEEDS, "there")
        assert here.pool is not None
        assert there.pool is None
        assert here.identity == there.identity
        assert "pool.backend=mooncake" in caplog.text

    with_services(PoolConfig(memory_bytes=1 << 20), work)


def test_each_machine_has_its_own_way_into_a_mooncake_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(services: Services) -> None:
        for node in ("here", "there"):
            shared = await services.for_server(NEEDS, node)
            assert shared.pool is not None
            assert shared.pool["backend"] == "mooncake"
            assert shared.pool["owner_address"] == f"{node}:1"

    monkeypatch.setattr(shared_services, "MachineStores", Stores)
    with_services(PoolConfig(backend="mooncake", memory_bytes=1 << 20), work)
    assert Stores.closed


def test_one_replica_has_no_pool() -> None:
    async def work(services: Services) -> None:
        assert (await services.for_server(NEEDS, "here")).pool is None

    with_services(PoolConfig(memory_bytes=1 << 20), work, num_servers=1)


def test_replicas_with_other_blocks_are_refused() -> None:
    async def work(services: Services) -> None:
        await services.for_server(NEEDS, "here")
        with pytest.raises(ConfigError, match="a replica has block_bytes=8192, not 4096 as the first one"):
            await services.for_server(msgspec.structs.replace(NEEDS, block_bytes=8192), "here")

    with_services(PoolConfig(backend="none"), work)


@pytest.mark.parametrize("drafts", [True, False])
def test_draft_servers_run_where_engines_draft(drafts: bool) -> None:
    async def work(services: Services) -> None:
        shared = await services.for_server(msgspec.structs.replace(NEEDS, drafts=drafts), "here")
        assert bool(shared.draft_servers) == drafts
        assert (shared.draft_keys is not None) == drafts

    with_services(PoolConfig(backend="none"), work)
