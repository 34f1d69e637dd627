# SPDX-License-Identifier: Apache-2.0
"""Sizes that were asked for and that this machine cannot hold: refused with the figure that fits."""

from __future__ import annotations

from collections.abc import Sequence

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
    asked_pool = _asked_pool_bytes(engine)
    if asked_pool > total:
        raise ConfigError(
            f"a pool of {show_size(asked_pool)}, and this machine has {show_size(total)} of memory",
            hint=f"--pool-memory {total // 2}, for example",
        )
    asked_kv = _asked_kv_bytes(engine)
    if asked_kv * config.instances + asked_pool > total:
        fitting = (total - asked_pool) // config.instances
        raise ConfigError(
            f"KV memory of {show_size(asked_kv)} for each of {config.instances} instances, "
            f"and this machine has {show_size(total)} of memory",
            hint=f"at most {show_size(fitting)} each would fit: --kv-memory {fitting}, or fewer instances",
        )


def refuse_more_than_fit(engine: PreparedEngine, num_instances: int, *, beside: Sequence[PreparedEngine]) -> None:
    """The same for instances that join others."""
    total, asked_kv = total_memory_bytes(), _asked_kv_bytes(engine)
    if engine.config.hosting.ray is not None:
        return  # their nodes find out
    free = total - sum(map(_asked_kv_bytes, beside)) - _asked_pool_bytes(engine)
    if asked_kv * num_instances > max(0, free):
        raise ConfigError(
            f"KV memory of {show_size(asked_kv)} for each of {num_instances} more instances, "
            f"and {show_size(max(0, free))} of this machine's {show_size(total)} were not asked for before",
            hint="less KV memory, or fewer instances",
        )


def _asked_pool_bytes(engine: PreparedEngine) -> int:
    return engine.config.pool.memory_bytes or 0 if pool_bytes(engine) else 0


def _asked_kv_bytes(engine: PreparedEngine) -> int:
    """KV memory that was asked for, for each instance; 0 where it is the default or on a GPU."""
    config = engine.config
    asked = config.kv.memory_bytes or 0
    if config.kv.blocks is not None:
        asked = config.kv.blocks * (engine.block_bytes or 0)
    return 0 if not config.on_cpu or asked == CPU_KV_BYTES else asked  # the default is taken when it is used
