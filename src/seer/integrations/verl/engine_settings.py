# SPDX-License-Identifier: Apache-2.0
"""The settings of the instance around a server's engine, and what they change in verl's arguments of vLLM.

verl's own settings decide memory, lengths, sequence slots and types. Seer changes only what its scheduler, its drafts
and its pool need.

Invariant: an engine argument that the user gave and that Seer must set is refused, not overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from seer.config import VllmSpeculation
from seer.drafting.curve_keys import ClientKeys
from seer.engine.prepare import OWN_ARGUMENTS
from seer.engine.vllm.engine_arguments import engine_arguments
from seer.engine.vllm.fitting import cpu_block_size, default_speculation, fit_to_model
from seer.engine.vllm.model_folder import ModelFolder, read_folder
from seer.engine.vllm.settings import VllmSettings
from seer.errors import ConfigError
from seer.integrations.verl.settings import ROLLOUT, WHERE, VerlSettings, read_settings, refuse_unsupported

_NO_OTHER = "leave it out: Seer has its own"
_ALWAYS = {
    "block_size": f"+{WHERE}.block_size",
    "num_gpu_blocks_override": f"+{WHERE}.kv_blocks",
    "kv_cache_memory_bytes": f"+{WHERE}.kv_blocks",
    "max_model_len": f"{ROLLOUT}.max_model_len",
    "stream_interval": f"+{WHERE}.stream_tokens",
    "enable_prefix_caching": "leave it out: it is on",
    "scheduler_cls": _NO_OTHER,
    "async_scheduling": _NO_OTHER,
    "worker_cls": f"{_NO_OTHER}; worker_extension_cls is taken",
    "speculative_config": f"+{WHERE}.drafts",
    "additional_config": _NO_OTHER,
    "kv_transfer_config": f"+{WHERE}.pool",
    "disable_log_stats": f"{ROLLOUT}.disable_log_stats",
}
"""Arguments of vLLM that Seer sets where its settings have them, and what to set instead; all others stay verl's."""
_ON_CPU = dict.fromkeys(
    ("max_num_batched_tokens", "enable_chunked_prefill"), "leave it out: vLLM on a CPU needs Seer's"
)
_OF_VERL = dict.fromkeys(OWN_ARGUMENTS, f"{ROLLOUT}.tensor_model_parallel_size spreads a replica")
_VALUE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}


class EngineNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What the shared services must know of an engine: its KV blocks, and whether it drafts."""

    block_bytes: int
    """On each rank."""
    block_size: int
    num_ranks: int
    drafts: bool


class SharedServices(msgspec.Struct, frozen=True, kw_only=True):
    """What all replicas share, as the driver answers a server that starts."""

    identity: str
    """Names this run's weights in the pool."""
    pool: dict[str, Any] | None
    draft_servers: tuple[str, ...]
    draft_keys: ClientKeys | None


class EngineSettings:
    """The settings of one replica's engine, from verl's configuration."""

    def __init__(self, rollout: Any, model: Any, device: str) -> None:
        refuse_unsupported(rollout, model)
        self._rollout, self._device = rollout, "cpu" if device == "cpu" else "cuda"
        refuse_own_arguments((rollout.engine_kwargs or {}).get("vllm") or {}, self._device)
        self.seer: VerlSettings = read_settings(rollout.custom)
        self._folder: ModelFolder = read_folder(Path(model.local_path))

    @property
    def drafts(self) -> VllmSpeculation | None:
        """How drafts are made; None where there are none."""
        if self.seer.speculation == "off":
            return None
        if self.seer.drafts is not None:
            return self.seer.drafts
        if self._device == "cpu":
            return VllmSpeculation()
        ranks = self._rollout.tensor_model_parallel_size
        return default_speculation(self._folder, on_cpu=False, tensor_parallel=ranks)

    def needs(self) -> EngineNeeds:
        """What this engine needs of the shared services."""
        block_size, ranks = self._block_size(), self._rollout.tensor_model_parallel_size
        value_bytes = _VALUE_BYTES.get(self._rollout.dtype, 2)
        return EngineNeeds(
            block_bytes=self._folder.block_bytes(block_size, value_bytes, ranks),
            block_size=block_size,
            num_ranks=ranks,
            drafts=self.drafts is not None,
        )

    def with_services(self, shared: SharedServices) -> VllmSettings:
        """The settings of the instance."""
        rollout, seer = self._rollout, self.seer
        settings = VllmSettings(
            model_dir=str(self._folder.path),
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=rollout.max_model_len,
            block_size=self._block_size(),
            kv_blocks=seer.kv_blocks,
            tensor_parallel=rollout.tensor_model_parallel_size,
            dtype=rollout.dtype,
            device=self._device,
            stream_tokens=seer.stream_tokens,
            speculation=self.drafts,
            draft_servers=shared.draft_servers,
            draft_keys=shared.draft_keys,
            pool=shared.pool,
            pool_options=seer.pool_options,
            engine={"load_format": "dummy"},  # verl sends the weights
        )
        return fit_to_model(settings, self._folder)

    def _block_size(self) -> int:
        size = self.seer.block_size
        return cpu_block_size(size, self._folder) if self._device == "cpu" else size


def refuse_own_arguments(given: Mapping[str, Any], device: str) -> None:
    """Refuse arguments of vLLM that would be overwritten; one that says what Seer sets anyway is none."""
    own = _ALWAYS | _OF_VERL | (_ON_CPU if device == "cpu" else {})
    for name, value in given.items():
        plain = name.replace("-", "_")  # verl takes both
        if plain in own and not (plain == "enable_prefix_caching" and value):
            raise ConfigError(
                f"{ROLLOUT}.engine_kwargs.vllm.{name}={value!r}: Seer sets this argument itself", hint=own[plain]
            )


def changed_arguments(settings: VllmSettings, identity: str) -> dict[str, Any]:
    """The arguments of vLLM that Seer changes; `settings` have passed the guards."""
    ours = engine_arguments(settings, identity)
    names = (*_ALWAYS, *_ON_CPU) if settings.device == "cpu" else _ALWAYS
    changed = {name: ours[name] for name in names if name in ours}
    return changed | {"disable_log_stats": False}  # our counters are fed by them


def apply_arguments(arguments: Any, settings: VllmSettings, identity: str) -> None:
    """Set them on verl's parsed arguments of `vllm serve`."""
    for name, value in changed_arguments(settings, identity).items():
        setattr(arguments, name, value)
    graphs: Mapping[str, Any] = engine_arguments(settings, identity).get("compilation_config") or {}
    for name, value in graphs.items():  # verl has chosen the rest of it
        setattr(arguments.compilation_config, name, value)
