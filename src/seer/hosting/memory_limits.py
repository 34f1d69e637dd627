# SPDX-License-Identifier: Apache-2.0
"""Sizes that were asked for and that this machine cannot hold: refused with the figure that fits."""

from __future__ import annotations

from seer.config.rollout import CPU_KV_BYTES
from seer.engine.prepare import PreparedEngine
from seer.errors import ConfigError
from seer.hosting.memory_plan import pool_bytes
from seer.machine.memory import total_memory_bytes
from seer.machine.sizes import show_size


def refuse_what_cannot_fit(engine: PreparedEngine) -> None:
    """Refuse sizes that were asked for and are beyond this machine, before anything is allocated.

    On a GPU the instances find out when they start: asking from here would take some of its memory.
    """
    config, total = engine.config, total_memory_bytes()
    if config.hosting.ray is not None:
        return  # the memory of other machines: their instances find out
    asked_pool = config.pool.memory_bytes or 0 if pool_bytes(engine) else 0
    if asked_pool > total:
        raise ConfigError(
            f"a pool of {show_size(asked_pool)}, and this machine has {show_size(total)} of memory",
            hint=f"--pool-memory {total // 2}, for example",
        )
    asked_kv = config.kv.memory_bytes or 0
    if config.kv.blocks is not None:
        asked_kv = config.kv.blocks * (engine.block_bytes or 0)
    if not config.on_cpu or asked_kv == CPU_KV_BYTES:  # the default: memory is taken when it is used
        return
    if asked_kv * config.instances + asked_pool > total:
        fitting = (total - asked_pool) // config.instances
        raise ConfigError(
            f"KV memory of {show_size(asked_kv)} for each of {config.instances} instances, "
            f"and this machine has {show_size(total)} of memory",
            hint=f"at most {show_size(fitting)} each would fit: --kv-memory {fitting}, or fewer instances",
        )
