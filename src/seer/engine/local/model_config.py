# SPDX-License-Identifier: Apache-2.0
"""Read a Hugging Face model folder: which model it is, and whether this engine can run it.

Only config.json and generation_config.json are read here; weights are in weights.py, tokens in tokenizer.py. A setting
that the engine does not support raises an error that names it, before any weight is read.

Invariants
  1. A `ModelConfig` describes a model that model.py computes exactly. Settings that `_refuse_unsupported` and
     `_rope_scaling` list as unsupported are refused, not ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seer.errors import InputError

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of `model_type` that model.py can compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a dense decoder of the Llama, Qwen2 or Qwen3 family."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_model_len: int
    tied_head: bool
    """The output matrix is the embedding table."""
    qkv_bias: bool
    qk_norm: bool
    """Queries and keys are normalised per head before rotation (Qwen3)."""
    rope_scaling: dict[str, Any] | None
    """Only the `llama3` kind is supported."""
    eos_token_ids: tuple[int, ...]
    stored_dtype: str

    def __post_init__(self) -> None:
        """Refuse shapes that no kernel can compute, before anything runs."""
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise InputError(f"head_dim={self.head_dim} is odd, but rotary embedding needs pairs")

    @property
    def qkv_width(self) -> int:
        """Columns of the joint query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Parameters of the matrices. Norms and biases, a fraction of a percent, are not counted."""
        width = self.num_heads * self.head_dim
        layer = self.hidden_size * (self.qkv_width + width + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)


def read_config(folder: Path) -> ModelConfig:
    """Read and check a folder's config.json."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise InputError(f"there is no model folder at {folder}", hint="`seer model get smollm2` downloads one")
    if not path.is_file():
        raise InputError(
            f"{folder} holds no config.json", hint="a Hugging Face folder has config.json and *.safetensors"
        )
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds {type(raw).__name__}, not an object")
    return config_from_dict(raw, source=str(path), eos=_generation_eos(folder))


def config_from_dict(raw: dict[str, Any], *, source: str, eos: tuple[int, ...] = ()) -> ModelConfig:
    """Check a parsed config.json; `source` names it in error messages."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise InputError(f"{source}: model_type={family!r} is not supported", hint=f"one of {', '.join(FAMILIES)}")
    _refuse_unsupported(raw, source)
    heads = _whole(raw, "num_attention_heads", source)
    hidden = _whole(raw, "hidden_size", source)
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or ({k: v for k, v in rope.items() if k != "rope_theta"} or None)
    return ModelConfig(
        family=family,
        vocab_size=_whole(raw, "vocab_size", source),
        hidden_size=hidden,
        intermediate_size=_whole(raw, "intermediate_size", source),
        num_layers=_whole(raw, "num_hidden_layers", source),
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_model_len=_whole(raw, "max_position_embeddings", source),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        # Qwen2 always has the bias, but its config.json does not say so.
        qkv_bias=family == "qwen2" or bool(raw.get("attention_bias", False)),
        qk_norm=family == "qwen3",
        rope_scaling=_rope_scaling(scaling, source),
        eos_token_ids=tuple(sorted({*_ids(raw.get("eos_token_id")), *eos})),
        stored_dtype=str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16"),
    )


def _refuse_unsupported(raw: dict[str, Any], source: str) -> None:
    quantized = raw.get("quantization_config")
    if quantized:
        raise InputError(f"{source}: quantized weights are not supported", hint="use a bf16, fp16 or fp32 folder")
    if raw.get("hidden_act", "silu") != "silu":
        raise InputError(f"{source}: hidden_act={raw['hidden_act']!r} is not supported", hint="only silu is")
    if raw.get("mlp_bias"):
        raise InputError(f"{source}: mlp_bias is not supported")
    if raw.get("use_sliding_window"):
        raise InputError(f"{source}: sliding-window attention is not supported")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise InputError(f"{source}: layer_types other than full_attention are not supported")
    if raw.get("num_experts") or raw.get("num_local_experts"):
        raise InputError(f"{source}: mixture-of-experts models are not supported")


def _rope_scaling(scaling: Any, source: str) -> dict[str, Any] | None:
    kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise InputError(f"{source}: rope scaling {kind!r} is not supported", hint="default or llama3")
    return dict(scaling)


def _whole(raw: dict[str, Any], key: str, source: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise InputError(f"{source}: {key}={value!r} must be an integer of at least 1")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _generation_eos(folder: Path) -> tuple[int, ...]:
    """End tokens that only generation_config.json names (chat models end turns with another token)."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        return _ids(json.loads(path.read_text()).get("eos_token_id"))
    except (ValueError, AttributeError):
        raise InputError(f"{path} is not a JSON object") from None
