# SPDX-License-Identifier: Apache-2.0
"""What all replicas share, owned by the driver: the KV pool and the draft servers. Made when the first server asks.

Draft servers listen on the driver's address, where the cluster has several machines. A pool in shared memory is for the
servers of the driver's machine: those of other machines compute KV that moves to them again. A Mooncake store has a
part on every machine with a server (machine_stores.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

import msgspec

from seer.errors import ConfigError
from seer.hosting.draft_servers import DraftServers, num_draft_servers
from seer.hosting.fleet_pool import FleetPool, default_pool_bytes, wanted_pool_bytes
from seer.integrations.verl.engine_settings import EngineNeeds, SharedServices
from seer.integrations.verl.machine_stores import MachineStores
from seer.integrations.verl.settings import VerlSettings

log = logging.getLogger(__name__)


class Services:
    """Starts the shared services once, and answers servers that start."""

    def __init__(self, settings: VerlSettings, num_servers: int, node: str, host: str) -> None:
        """`node` is Ray's name of the driver's machine, `host` the address that servers know it by."""
        self._settings, self._num_servers, self._node, self._host = settings, num_servers, node, host
        self._identity = f"verl-{secrets.token_hex(8)}"
        self._needs: EngineNeeds | None = None
        self._lock = asyncio.Lock()
        self.pool: FleetPool | None = None
        self.draft_servers: DraftServers | None = None
        self._stores: MachineStores | None = None

    async def for_server(self, needs: EngineNeeds, node: str) -> SharedServices:
        """What a server on this node is to use."""
        async with self._lock:
            if self._needs is None:
                await self._start(needs)
                self._needs = needs
        if needs != self._needs:
            given, first = msgspec.structs.asdict(needs), msgspec.structs.asdict(self._needs)
            unlike = ", ".join(
                f"{name}={value}, not {first[name]}" for name, value in given.items() if value != first[name]
            )
            raise ConfigError(
                f"a replica has {unlike} as the first one", hint="all replicas need the same model, dtype and settings"
            )
        drafts = self.draft_servers
        return SharedServices(
            identity=self._identity,
            pool=await self._pool_settings(node),
            draft_servers=drafts.addresses if drafts is not None else (),
            draft_keys=drafts.client_keys if drafts is not None else None,
        )

    async def close(self) -> None:
        """End the draft servers and free the pool."""
        if self.draft_servers is not None:
            await self.draft_servers.close()
        if self._stores is not None:
            await self._stores.close()
        if self.pool is not None:
            self.pool.close()

    async def _start(self, needs: EngineNeeds) -> None:
        self.pool = self._make_pool(needs)
        if self.pool is not None:
            self.pool.start()
            if self.pool.between_nodes is not None:
                self._stores = MachineStores(self.pool.between_nodes)
                await self._stores.start()
        if needs.drafts:
            self.draft_servers = DraftServers(num_draft_servers(self._num_servers), host=self._host)
            await self.draft_servers.start()

    async def _pool_settings(self, node: str) -> dict[str, Any] | None:
        """Of a server on this node."""
        if self.pool is None:
            return None
        if self._stores is not None:
            return {**self.pool.settings, **await self._stores.way_in(node)}
        if node == self._node:
            return self.pool.settings
        log.warning(
            "a server on another machine cannot use the local pool: what moves there is computed again "
            "(+actor_rollout_ref.rollout.custom.seer.pool.backend=mooncake)"
        )
        return None

    def _make_pool(self, needs: EngineNeeds) -> FleetPool | None:
        config = self._settings.pool
        sizes = {"block_bytes": needs.block_bytes, "block_size": needs.block_size, "num_ranks": needs.num_ranks}
        if config.backend == "none" or config.memory_bytes == 0 or self._num_servers == 1:
            return None
        kv_bytes = self._kv_bytes(needs)
        if config.backend == "mooncake":
            node_bytes = config.memory_bytes or wanted_pool_bytes(kv_bytes, self._num_servers)
            return FleetPool.between(node_bytes, **sizes, protocol=config.protocol)
        num_bytes = config.memory_bytes or default_pool_bytes(kv_bytes, self._num_servers)
        return FleetPool.local(**sizes, dram_bytes=num_bytes, ssd=None)

    def _kv_bytes(self, needs: EngineNeeds) -> int | None:
        """KV memory of a server, where it is known before it starts."""
        blocks = self._settings.kv_blocks
        return None if blocks is None else blocks * needs.block_bytes * needs.num_ranks
