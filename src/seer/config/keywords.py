# SPDX-License-Identifier: Apache-2.0
"""The keyword arguments of `seer.Rollout`: the fields of `RolloutConfig`, and short names for those of its sections."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from seer.config.engines import EngineConfig, EngineName
from seer.config.rollout import HostingConfig, KvConfig, PoolBackend, PoolConfig, SpeculationMode

SHORT_NAMES = {
    "kv_memory_bytes": ("kv", "memory_bytes"),
    "kv_blocks": ("kv", "blocks"),
    "block_size": ("kv", "block_size"),
    "pool": ("pool", "backend"),  # where it is a string; a PoolConfig is the whole section
    "pool_bytes": ("pool", "memory_bytes"),
    "pool_name": ("pool", "name"),
    "pool_ssd_dir": ("pool", "ssd_dir"),
    "pool_ssd_bytes": ("pool", "ssd_bytes"),
    "ray": ("hosting", "ray"),
}
"""Short name -> section and field."""


class InstanceKeywords(TypedDict, total=False):
    """What instances that join a rollout may have of their own; see `RolloutConfig`. None: as the rollout has it."""

    tensor_parallel: int | None
    kv_memory_bytes: int | None
    kv_blocks: int | None
    max_num_seqs: int | None
    gpus: Sequence[int] | str | None


class RolloutKeywords(TypedDict, total=False):
    """See `RolloutConfig` for meanings and defaults."""

    instances: int
    engine: EngineName
    device: str
    gpus: Sequence[int] | str | None
    share_gpus: bool
    tensor_parallel: int
    data_parallel: int
    dtype: str
    max_num_seqs: int | None
    max_model_len: int | None
    scheduler: str
    speculation: SpeculationMode
    chunk_tokens: int | None
    kv: KvConfig | dict[str, Any]
    pool: PoolBackend | PoolConfig | dict[str, Any]
    hosting: HostingConfig | dict[str, Any]
    engine_settings: EngineConfig | dict[str, Any] | None
    kv_memory_bytes: int | None
    kv_blocks: int | None
    block_size: int
    pool_bytes: int | None
    pool_name: str
    pool_ssd_dir: Path | None
    pool_ssd_bytes: int | None
    ray: str | None
