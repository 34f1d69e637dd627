# SPDX-License-Identifier: Apache-2.0
"""The engines by name: find the model, and resolve the configuration that an instance's process gets.

The driver needs little of an engine: how a process makes an instance, the tokenizer, and the longest context. Weights
are read by the instances.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seer.config import FakeEngineConfig, LocalEngineConfig, RolloutConfig, VllmEngineConfig, VllmSpeculation
from seer.engine.admission import refuse_no_token
from seer.engine.gpu_memory import num_visible_gpus
from seer.engine.instance_settings import InstanceSettings
from seer.engine.text_codec import ChatCodec
from seer.errors import ConfigError, MissingExtra
from seer.types import Sampling

if TYPE_CHECKING:
    from seer.engine.vllm.model_folder import ModelFolder

GPU_KV_SHARE = 0.6
"""Of a GPU's free memory, for the KV of all instances on it; weights and activations need the rest."""
VLLM_GPU_SHARE = 0.9
"""Of a GPU's memory, for all vLLM instances on it: vLLM's own default for one."""
OWN_ARGUMENTS = {
    "tensor_parallel_size": "set tensor_parallel of the rollout",
    "pipeline_parallel_size": "tensor_parallel spreads an instance; pipelines are not supported",
    "data_parallel_size": "set data_parallel of the rollout",
    "data_parallel_size_local": "set data_parallel of the rollout",
    **dict.fromkeys(
        ("data_parallel_rank", "data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port"),
        "leave it out: ranks are told where they meet at each start; set data_parallel of the rollout",
    ),
    "data_parallel_backend": "leave it out: Seer starts the ranks",
    **dict.fromkeys(
        ("data_parallel_external_lb", "data_parallel_hybrid_lb", "data_parallel_multi_port_external_lb"),
        "leave it out: Seer decides which rank gets a request",
    ),
}
"""Arguments of vLLM that are refused, and what to set instead."""
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """How a process makes its instance."""

    factory: str
    """`module:function`, called with (id, settings, event sink); imported by the child alone."""
    settings: InstanceSettings | dict[str, Any]
    """Sent as plain values. A dictionary is for a factory that is not one of Seer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEngine:
    """An engine and a model, ready to be started."""

    factory: str
    """Makes an instance in its process: see `InstanceSpec`."""
    config: RolloutConfig
    """What runs: the model's folder, its type and its longest context are filled in."""
    codec: ChatCodec | None
    max_model_len: int
    """The longest context that an instance can both address and hold."""
    model_dir: Path | None
    block_bytes: int | None
    """Of one KV block, where a pool can hold it; with tensor parallelism, of the part that each rank holds."""
    vocab_size: int | None
    """Token ids are below it; None where the engine has no model."""
    value_bytes: int | None
    """Of one number in the type that the engine computes in."""
    can_draft: bool
    shares_matrices: bool = False
    """Whether its instances on one machine share packed weights in a folder."""
    opens_gpu_handles: bool = False
    """Whether it can map new weights where they are on the GPU."""
    refuse_sampling: Callable[[Sampling], None] | None = None
    """Raises for sampling that the engine cannot do; None where it can do all."""


def prepare(config: RolloutConfig) -> PreparedEngine:
    """Find the model, read its configuration and its tokenizer; no weights."""
    engine = _prepare(config.fitted())
    return engine if engine.model_dir is None else replace(engine, codec=_read_codec(engine.model_dir))


def prepare_beside(engine: PreparedEngine, config: RolloutConfig) -> PreparedEngine:
    """The same model on instances that are set otherwise; its tokenizer, which takes long to read, is kept."""
    return replace(_prepare(replace(config, model=engine.config.model).fitted()), codec=engine.codec)


def _prepare(fitted: RolloutConfig) -> PreparedEngine:
    if isinstance(fitted.engine_settings, LocalEngineConfig):
        return _prepare_local(fitted, fitted.engine_settings)
    if isinstance(fitted.engine_settings, VllmEngineConfig):
        return _prepare_vllm(fitted, fitted.engine_settings)
    assert isinstance(fitted.engine_settings, FakeEngineConfig), "there are three engines"
    return _prepare_fake(fitted)


def _prepare_local(config: RolloutConfig, engine: LocalEngineConfig) -> PreparedEngine:
    try:
        from seer.engine.local.model_config import read_config
        from seer.engine.local.models_get import find_model
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "local") from None
    folder = find_model(config.model).resolve()
    model = read_config(folder)
    context = min(config.max_model_len or model.max_model_len, model.max_model_len)
    dtype = ("float32" if config.on_cpu else "bfloat16") if config.dtype == "auto" else config.dtype
    value_bytes = _VALUE_BYTES[dtype]
    if not config.on_cpu and engine.memory_share is None:
        engine = replace(engine, memory_share=GPU_KV_SHARE / instances_per_gpu(config))
    return PreparedEngine(
        factory="seer.engine.local.hosted:make_local",
        config=replace(config, model=str(folder), max_model_len=context, dtype=dtype, engine_settings=engine),
        codec=None,
        max_model_len=_fits(context, config),
        model_dir=folder,
        block_bytes=2 * model.num_layers * model.num_kv_heads * model.head_dim * config.kv.block_size * value_bytes,
        vocab_size=model.vocab_size,
        value_bytes=value_bytes,
        can_draft=True,
        shares_matrices=config.on_cpu,
        opens_gpu_handles=not config.on_cpu,
        refuse_sampling=functools.partial(
            refuse_no_token, eos_token_ids=model.eos_token_ids, vocab_size=model.vocab_size
        ),
    )


def _prepare_vllm(config: RolloutConfig, engine: VllmEngineConfig) -> PreparedEngine:
    from seer.engine.vllm.model_folder import read_folder
    from seer.engine.vllm.sampling_limits import refuse_sampling
    from seer.engine.vllm.version import require_vllm

    require_vllm()
    try:
        from seer.engine.local.models_get import find_model
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "local") from None
    folder = read_folder(find_model(config.model).resolve())
    resolved = _resolve_vllm(config, engine, folder)
    assert isinstance(resolved.engine_settings, VllmEngineConfig), "it is vLLM's configuration"
    assert resolved.max_model_len is not None, "it was read from the model"
    drafts = _drafts(resolved, resolved.engine_settings)
    stored = folder.stored_dtype if resolved.dtype == "auto" else resolved.dtype
    value_bytes = _VALUE_BYTES.get(stored, 2)
    return PreparedEngine(
        factory="seer.engine.vllm.hosted:make_vllm",
        config=resolved,
        codec=None,
        max_model_len=_fits(resolved.max_model_len, resolved),
        model_dir=folder.path,
        block_bytes=folder.block_bytes(resolved.kv.block_size, value_bytes, config.tensor_parallel),
        vocab_size=folder.vocab_size,
        value_bytes=value_bytes,
        can_draft=resolved.engine_settings.speculation is not None,
        opens_gpu_handles=not config.on_cpu,
        refuse_sampling=functools.partial(
            refuse_sampling,
            folder=folder,
            on_cpu=config.on_cpu,
            drafts_in_scheduler=drafts is not None and drafts.place == "scheduler",
        ),
    )


def _resolve_vllm(config: RolloutConfig, engine: VllmEngineConfig, folder: ModelFolder) -> RolloutConfig:
    """The configuration with what vLLM needs of this model on this device."""
    from seer.engine.vllm.fitting import cpu_block_size, default_speculation
    from seer.engine.vllm.passed_arguments import refuse_arguments

    refuse_own_arguments(engine.engine)
    pool = config.pool
    may_have_pool = pool.backend != "none" and (config.instances > 1 or pool.memory_bytes or pool.ssd_dir is not None)
    _refuse_uneven_ranks(folder, config.tensor_parallel)
    _refuse_too_few_experts(folder, config)
    refuse_arguments(engine.engine, on_cpu=config.on_cpu, has_pool=bool(may_have_pool))
    kv, dtype = config.kv, config.dtype
    if engine.speculation is None:
        chosen = default_speculation(folder, on_cpu=config.on_cpu, tensor_parallel=config.tensor_parallel)
        engine = replace(engine, speculation=chosen)
    _refuse_ranks_with_drafts_on_gpu(config, engine)
    if config.on_cpu:
        dtype = "float32" if dtype == "auto" else dtype
        kv = replace(kv, block_size=cpu_block_size(kv.block_size, folder))
    elif instances_per_gpu(config) > 1 and kv.memory_bytes is None and kv.blocks is None:
        share = {"gpu_memory_utilization": VLLM_GPU_SHARE / instances_per_gpu(config)}
        engine = replace(engine, engine=share | engine.engine)
    lookahead = engine.speculation.max_draft_tokens + 1 if engine.speculation is not None else 0
    context = min(config.max_model_len or folder.max_model_len, folder.max_model_len - lookahead)
    return replace(config, model=str(folder.path), max_model_len=context, dtype=dtype, kv=kv, engine_settings=engine)


def _refuse_uneven_ranks(folder: ModelFolder, num_ranks: int) -> None:
    """Refuse ranks among which vLLM cannot divide the model; it would say so after its imports."""
    if folder.num_heads % num_ranks:
        fitting = ", ".join(str(ranks) for ranks in range(1, folder.num_heads + 1) if not folder.num_heads % ranks)
        raise ConfigError(
            f"tensor_parallel={num_ranks} does not divide the model's {folder.num_heads} attention heads",
            hint=f"one of {fitting}",
        )
    fewer, more = sorted((folder.num_kv_heads, num_ranks))
    if folder.latent_dim is None and more % fewer:
        raise ConfigError(
            f"tensor_parallel={num_ranks} and {folder.num_kv_heads} KV heads: neither divides the other",
            hint="a divisor of the KV heads, or a multiple of them",
        )


def _refuse_too_few_experts(folder: ModelFolder, config: RolloutConfig) -> None:
    """Refuse instances that would share experts which the model does not have, or not enough of."""
    num_ranks = config.data_parallel * config.tensor_parallel
    if config.data_parallel > 1 and folder.num_experts < num_ranks:
        raise ConfigError(
            f"data_parallel={config.data_parallel} and tensor_parallel={config.tensor_parallel} spread experts over "
            f"{num_ranks} ranks, and the model has {folder.num_experts} in a layer",
            hint="more instances without data_parallel: each has the whole model"
            if not folder.num_experts
            else f"at most {folder.num_experts} ranks",
        )


def _refuse_ranks_with_drafts_on_gpu(config: RolloutConfig, engine: VllmEngineConfig) -> None:
    drafts = _drafts(config, engine)
    if config.data_parallel > 1 and drafts is not None and drafts.place == "gpu":
        raise ConfigError(
            f"engine_settings.speculation.place='gpu' and data_parallel={config.data_parallel}",
            hint="place='scheduler' or speculation='off': the ranks of an engine step together, each with other drafts",
        )


def _drafts(config: RolloutConfig, engine: VllmEngineConfig) -> VllmSpeculation | None:
    """How vLLM drafts, if it does."""
    return engine.speculation if config.speculation == "auto" else None


def instances_per_gpu(config: RolloutConfig) -> int:
    """Instances on the GPU that has most; without `share_gpus` each has its own, or the start is refused."""
    if not config.share_gpus:
        return 1
    num_groups = len(config.chosen_gpus(num_visible_gpus())) // config.tensor_parallel
    return -(-config.instances // max(1, num_groups))


def refuse_own_arguments(engine: Mapping[str, Any]) -> None:
    """Refuse arguments of vLLM that Seer sets itself, or that spread an instance in ways it does not know."""
    for name, hint in OWN_ARGUMENTS.items():
        if name in engine:
            raise ConfigError(f"engine_settings.engine.{name}={engine[name]!r}", hint=hint)


def _prepare_fake(config: RolloutConfig) -> PreparedEngine:
    from seer.engine.fake import KV_BLOCKS, MAX_MODEL_LEN

    context = config.max_model_len or MAX_MODEL_LEN
    kv = replace(config.kv, blocks=config.kv.blocks or KV_BLOCKS)
    return PreparedEngine(
        factory="seer.engine.fake:make_fake",
        config=replace(config, max_model_len=context, kv=kv),
        codec=None,
        max_model_len=_fits(context, config),
        model_dir=None,
        block_bytes=None,
        vocab_size=None,
        value_bytes=None,
        can_draft=False,
    )


def _read_codec(folder: Path) -> ChatCodec | None:
    """The model's tokenizer. Without one, prompts come as token ids and responses have no text."""
    from seer.engine.local.tokenizer import Tokenizer

    return Tokenizer(folder) if (folder / "tokenizer.json").exists() else None


def _fits(context: int, config: RolloutConfig) -> int:
    """The longest context that an instance can both address and hold."""
    return context if config.kv.blocks is None else min(context, config.kv.blocks * config.kv.block_size)
