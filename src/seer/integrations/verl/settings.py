# SPDX-License-Identifier: Apache-2.0
"""Seer's settings inside verl's: `actor_rollout_ref.rollout.custom.seer.*`. Every one has a default.

What Seer cannot do is refused by the name of verl's setting, before an engine starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seer.config import PoolConfig, TransferOptions, VllmSpeculation, build
from seer.config.rollout import SPECULATION_MODES, SpeculationMode
from seer.errors import ConfigError
from seer.ranges import BlockSize, Count, CountOrZero, Seconds, check_fields
from seer.scheduling.registry import parse_scheduler

WHERE = "actor_rollout_ref.rollout.custom.seer"
ROLLOUT = "actor_rollout_ref.rollout"
ENVIRONMENT, TOOLS = f"+{WHERE}.environment=", f"+{WHERE}.tools="


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlSettings:
    """Settings of Seer in verl; those of the engine (memory, sequence slots, lengths) are verl's own."""

    scheduler: str = "seer"
    """`seer simulate --help` lists the schedulers."""
    speculation: SpeculationMode = "auto"
    """`auto`: grouped drafts as the scheduler says; `off`: none."""
    drafts: VllmSpeculation | None = None
    """Where and how drafts are made. None: in the scheduler's process on a CPU, on the GPU where they are known to
    work."""
    chunk_tokens: Count | None = None
    """Tokens a request may generate before it is placed anew. None: an eighth of the longest response."""
    block_size: BlockSize = 16
    """Tokens of a KV block. vLLM on a CPU rounds it up to a multiple of 32."""
    kv_blocks: Count | None = None
    """KV memory of each replica in blocks. None: as `gpu_memory_utilization` says; 1 GiB on a CPU."""
    stream_tokens: Count = 16
    """Tokens of a request between two outputs."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """The KV pool that the replicas share: in shared memory of one machine, or a Mooncake store."""
    pool_options: TransferOptions = field(default_factory=TransferOptions)
    """How KV blocks move between vLLM and the pool."""
    start_deadline_s: Seconds = 600.0
    """From the launch of a replica's server to its first answer, after it was lost."""
    weights_deadline_s: Seconds = 600.0
    """A replica that takes longer over one bucket of weights, or over one answer of a weight sync, is lost."""
    stall_deadline_s: Seconds = 900.0
    """The rollout fails if no replica sends anything for this long while requests wait."""
    environment: str | None = None
    """What responses talk to after each turn: MODULE:NAME or FILE.py:NAME. None: verl's own agent loops."""
    environment_deadline_s: Seconds = 60.0
    """Of each call of the environment."""
    tools: str | None = None
    """Schemas for the chat template, beside an environment: MODULE:NAME or FILE.py:NAME of one or of a list."""
    run_dir: Path | None = None
    """Where the run is recorded for `seer report`. None: `seer` in the folder of verl's checkpoints."""
    keep_steps: CountOrZero = 4
    """Rollouts whose events are kept in `run_dir`; 0 keeps none."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        check_fields(self)
        if self.speculation not in SPECULATION_MODES:
            raise ConfigError(f"speculation={self.speculation!r}", hint="auto or off")
        if self.pool.ssd_dir is not None:
            raise ConfigError("pool.ssd_dir is not supported in verl", hint="leave it out")
        if self.tools is not None and self.environment is None:
            raise ConfigError(
                f"tools={self.tools!r} are for an environment, and there is none",
                hint=f"+{WHERE}.environment=MODULE:NAME; tools of verl are set in {ROLLOUT}.multi_turn",
            )
        parse_scheduler(self.scheduler)


def read_settings(custom: Mapping[str, Any] | None) -> VerlSettings:
    """The settings in `rollout.custom`; an unknown one is refused with the nearest known one."""
    given = (custom or {}).get("seer") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{WHERE}={given!r} is not a section", hint=f"+{WHERE}.scheduler=seer, for example")
    return build(VerlSettings, _plain(given), where=WHERE)


def _plain(values: Any) -> Any:
    """Hydra's containers as dictionaries and lists."""
    if isinstance(values, Mapping):
        return {str(key): _plain(value) for key, value in values.items()}
    return values if isinstance(values, str) or not hasattr(values, "__iter__") else [_plain(one) for one in values]


def refuse_unsupported(rollout: Any, model: Any) -> None:
    """Refuse the first of verl's settings that Seer does not support; `rollout` and `model` are its configurations."""
    lora = getattr(model, "lora", None) or {}
    adapters = getattr(model, "lora_rank", 0), lora.get("rank", 0), getattr(model, "lora_adapter_path", None)
    has_adapter = any(adapters) and not lora.get("merge", False)
    mtp = getattr(rollout, "mtp", None)
    disaggregation = getattr(rollout, "disaggregation", None)
    refusals: tuple[tuple[bool, str, str], ...] = (
        (has_adapter, "model.lora_rank: Seer does not roll out adapters", "model.lora.merge=True merges them"),
        (rollout.data_parallel_size > 1, f"{ROLLOUT}.data_parallel_size", "use more replicas: 1 here"),
        (rollout.pipeline_model_parallel_size > 1, f"{ROLLOUT}.pipeline_model_parallel_size", "use 1"),
        (rollout.enable_rollout_routing_replay, f"{ROLLOUT}.enable_rollout_routing_replay", "use rollout.name=vllm"),
        (bool(disaggregation and disaggregation.enabled), f"{ROLLOUT}.disaggregation", "use rollout.name=vllm"),
        (bool(mtp and mtp.enable and mtp.enable_rollout), f"{ROLLOUT}.mtp.enable_rollout", "grouped drafts replace it"),
        (rollout.full_determinism, f"{ROLLOUT}.full_determinism", "placement depends on time: leave it out"),
        (rollout.get("repetition_penalty", 1.0) != 1.0, f"{ROLLOUT}.repetition_penalty", "use 1.0"),
        (not rollout.get("enable_prefix_caching", True), f"{ROLLOUT}.enable_prefix_caching=False", "use True"),
        (
            bool(rollout.get("router_config_path")),
            f"{ROLLOUT}.router_config_path",
            "Seer places requests: leave it out",
        ),
        (rollout.get("scheduling_policy") == "priority", f"{ROLLOUT}.scheduling_policy=priority", "use fcfs"),
        (rollout.logprobs_mode != "processed_logprobs", f"{ROLLOUT}.logprobs_mode", "use processed_logprobs"),
    )
    for applies, what, hint in refusals:
        if applies:
            raise ConfigError(f"{what} is not supported with rollout.name=seer", hint=hint)
