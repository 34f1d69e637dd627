"""The engines by name: how a child process makes an instance, and what the driver must know.

The driver needs little of an engine: how to have an instance made elsewhere, the tokenizer, and how long a
context may be. That is all this file reads; weights are read by the instances.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from seer.engine.text_codec import TextCodec
from seer.errors import ConfigError, InputError, MissingExtra

EngineName = Literal["local", "vllm", "fake"]
ENGINES = ("local", "vllm", "fake")

GPU_KV_SHARE = 0.6
"""Of a GPU's free memory, for the KV of all instances on it: weights and activations want theirs."""
_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """How a process makes its instance; plain values only, since they travel."""

    factory: str
    """`module:function`, called with (id, settings, event sink); imported by the child alone."""
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSettings:
    """What may be set on every instance; None leaves it to the engine."""

    kv_blocks: int | None = None
    kv_memory_bytes: int | None = None
    block_size: int = 16
    max_num_seqs: int = 16
    max_model_len: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    num_instances: int = 1
    """How many share the device; an instance that is not told its KV memory takes its part of what is free."""
    extra: dict[str, Any] | None = None
    """Passed to the engine as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEngine:
    """An engine and a model, ready to be started."""

    spec: InstanceSpec
    codec: TextCodec | None
    max_model_len: int
    model_dir: Path | None
    block_bytes: int | None
    """Of one KV block, where a pool can hold it."""
    block_size: int = 16
    can_draft: bool
    shares_matrices: bool = False
    """Whether its instances on one machine want a folder to share packed weights in."""
    opens_gpu_handles: bool = False
    """Whether new weights may be handed to it where they are on the GPU."""


def prepare(engine: str, model: str | Path, settings: InstanceSettings) -> PreparedEngine:
    """Check the names, read the model's configuration and its tokenizer; no weights."""
    if engine == "local":
        return _prepare_local(model, settings)
    if engine == "vllm":
        return _prepare_vllm(model, settings)
    if engine == "fake":
        return _prepare_fake(settings)
    raise ConfigError(f"unknown engine {engine!r}", hint=f"one of {', '.join(ENGINES)}")


def _prepare_local(model: str | Path, settings: InstanceSettings) -> PreparedEngine:
    try:
        from seer.engine.local.model_config import read_config
        from seer.engine.local.models_get import find_model
        from seer.engine.local.tokenizer import Tokenizer
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "local") from None
    folder = find_model(str(model)).resolve()
    config = read_config(folder)
    try:
        codec: TextCodec | None = Tokenizer(folder)
    except InputError:
        codec = None  # prompts come as token ids, and responses have no text
    context = min(settings.max_model_len or config.max_model_len, config.max_model_len)
    value_bytes = _VALUE_BYTES.get(settings.dtype, 4 if settings.device == "cpu" else 2)
    block_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * settings.block_size * value_bytes
    kv = {"kv_blocks": settings.kv_blocks, "kv_memory_bytes": settings.kv_memory_bytes}
    chosen: dict[str, Any] = {
        "model_dir": str(folder),
        "block_size": settings.block_size,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": context,
        "dtype": settings.dtype,
        "device": settings.device,
        **{key: value for key, value in kv.items() if value is not None},
        **({"memory_share": GPU_KV_SHARE / settings.num_instances} if settings.device != "cpu" else {}),
        **(settings.extra or {}),
    }
    return PreparedEngine(
        spec=InstanceSpec(factory="seer.engine.local.hosted:make_local", settings=chosen),
        codec=codec,
        max_model_len=_fits(context, settings),
        model_dir=folder,
        block_bytes=block_bytes,
        block_size=settings.block_size,
        can_draft=True,
        shares_matrices=settings.device == "cpu",
        opens_gpu_handles=settings.device != "cpu",
    )


def _prepare_vllm(model: str | Path, settings: InstanceSettings) -> PreparedEngine:
    from seer.engine.vllm.model_folder import read_folder
    from seer.engine.vllm.settings import CPU_BLOCK_STEP
    from seer.engine.vllm.version import require_vllm

    require_vllm()
    try:
        from seer.engine.local.models_get import find_model
        from seer.engine.local.tokenizer import Tokenizer
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "local") from None
    folder = read_folder(find_model(str(model)).resolve())
    try:
        codec: TextCodec | None = Tokenizer(folder.path)
    except InputError:
        codec = None  # prompts come as token ids, and responses have no text
    own = dict(settings.extra or {})
    on_cpu = settings.device == "cpu"
    # Off on a GPU unless asked for: there vLLM without drafts runs on another, faster path.
    wanted = own.pop("speculation", on_cpu)
    speculation: dict[str, Any] = wanted if isinstance(wanted, dict) else {}
    lookahead = speculation.get("max_draft_tokens", 8) + 1 if wanted else 0
    context = min(settings.max_model_len or folder.max_model_len, folder.max_model_len - lookahead)
    dtype = ("float32" if on_cpu else "auto") if settings.dtype == "auto" else settings.dtype
    stored = folder.stored_dtype if dtype == "auto" else dtype
    block_size = -(-settings.block_size // CPU_BLOCK_STEP) * CPU_BLOCK_STEP if on_cpu else settings.block_size
    chosen: dict[str, Any] = {
        "model_dir": str(folder.path),
        "block_size": block_size,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": context,
        "dtype": dtype,
        "device": settings.device,
        "kv_blocks": settings.kv_blocks,
        "kv_memory_bytes": settings.kv_memory_bytes,
        **({"speculation": speculation} if wanted else {}),
        **own,
    }
    return PreparedEngine(
        spec=InstanceSpec(factory="seer.engine.vllm.hosted:make_vllm", settings=chosen),
        codec=codec,
        max_model_len=_fits(context, replace(settings, block_size=block_size)),
        model_dir=folder.path,
        block_bytes=folder.block_bytes(block_size, _VALUE_BYTES.get(stored, 2)),
        block_size=block_size,
        can_draft=bool(wanted),
    )


def _prepare_fake(settings: InstanceSettings) -> PreparedEngine:
    context = settings.max_model_len or 8192
    chosen = {
        "kv_blocks": settings.kv_blocks or 1024,
        "block_size": settings.block_size,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": context,
        **(settings.extra or {}),
    }
    return PreparedEngine(
        spec=InstanceSpec(factory="seer.engine.fake:make_fake", settings=chosen),
        codec=None,
        max_model_len=_fits(context, settings),
        model_dir=None,
        block_bytes=None,
        block_size=settings.block_size,
        can_draft=False,
    )


def _fits(context: int, settings: InstanceSettings) -> int:
    """The longest context that an instance can both address and hold."""
    return context if settings.kv_blocks is None else min(context, settings.kv_blocks * settings.block_size)
