# SPDX-License-Identifier: Apache-2.0
"""Which pool the instances of a rollout share: none, one in this machine's memory, or a Mooncake store.

Invariants
  1. The pool is as large as memory_plan.py says, so `--dry-run` shows what a run would take.
  2. Nothing is started here, and no memory is taken.
"""

from __future__ import annotations

import logging

from seer.engine.prepare import PreparedEngine
from seer.hosting.fleet_pool import FleetPool
from seer.hosting.memory_plan import node_pool_bytes, pool_bytes, pool_ssd

log = logging.getLogger(__name__)


def choose_pool(engine: PreparedEngine) -> FleetPool | None:
    """The pool that a configuration asks for; None for none."""
    num_bytes, config = pool_bytes(engine), engine.config
    if num_bytes == 0 or engine.block_bytes is None:
        if config.hosting.ray is not None and config.instances > 1 and config.pool.backend == "local":
            log.warning(
                "nodes of a Ray cluster share no KV pool: a request that moves is computed again (pool='mooncake')"
            )
        return None
    block_bytes, block_size, num_ranks = engine.block_bytes, config.kv.block_size, config.tensor_parallel
    if num_bytes is None and config.hosting.ray is not None:
        node_bytes = node_pool_bytes(engine)
        return FleetPool.between(
            node_bytes,
            block_bytes=block_bytes,
            block_size=block_size,
            num_ranks=num_ranks,
            protocol=config.pool.protocol,
        )
    if num_bytes is None:
        return FleetPool.mooncake(config.pool.name, block_bytes=block_bytes, block_size=block_size, num_ranks=num_ranks)
    return FleetPool.local(
        block_bytes=block_bytes,
        block_size=block_size,
        num_ranks=num_ranks,
        dram_bytes=num_bytes,
        ssd=pool_ssd(engine),
    )
