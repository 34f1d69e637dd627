# SPDX-License-Identifier: Apache-2.0
"""Read a Hugging Face model folder: which model it is, and whether this engine can run it.

Only config.json and generation_config.json are read here; weights are in weights.py, tokens in tokenizer.py. A setting
that the engine does not support raises an error that names it, before any weight is read.

Invariants
  1. A `ModelConfig` describes a model that model.py computes exactly. Settings that `_refuse_unsupported` and
     `_rope_scaling` list as unsupported are refused, not ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from seer.engine.hub_files import (
    Llama3Scaling,
    LocalDecoderFields,
    RopeBase,
    end_tokens,
    generation_end_tokens,
    read_config_object,
)
from seer.errors import InputError
from seer.machine.json_files import parse_struct
from seer.ranges import check

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
    raw = read_config_object(folder)
    return config_from_dict(raw, source=str(folder / "config.json"), eos=generation_end_tokens(folder))


def config_from_dict(raw: dict[str, Any], *, source: str, eos: tuple[int, ...] = ()) -> ModelConfig:
    """Check a parsed config.json; `source` names it in error messages."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise InputError(f"{source}: model_type={family!r} is not supported", hint=f"one of {', '.join(FAMILIES)}")
    if raw.get("quantization_config"):
        raise InputError(f"{source}: quantized weights are not supported", hint="use a bf16, fp16 or fp32 folder")
    read = parse_struct(raw, LocalDecoderFields, source=source)
    _refuse_unsupported(read, source)
    rope = read.rope_parameters or {}
    scaling = read.rope_scaling or {key: value for key, value in rope.items() if key != "rope_theta"}
    theta = read.rope_theta or rope.get("rope_theta") or 10_000.0
    check(theta, RopeBase, f"{source}: rope_theta")
    return ModelConfig(
        family=family,
        vocab_size=read.vocab_size,
        hidden_size=read.hidden_size,
        intermediate_size=read.intermediate_size,
        num_layers=read.num_hidden_layers,
        num_heads=read.num_attention_heads,
        num_kv_heads=read.num_key_value_heads or read.num_attention_heads,
        head_dim=read.head_width(source),
        rope_theta=float(theta),
        rms_norm_eps=read.rms_norm_eps,
        max_model_len=read.max_position_embeddings,
        tied_head=bool(read.tie_word_embeddings),
        # Qwen2 always has the bias, but its config.json does not say so.
        qkv_bias=family == "qwen2" or bool(read.attention_bias),
        qk_norm=family == "qwen3",
        rope_scaling=_rope_scaling(scaling, source),
        eos_token_ids=tuple(sorted({id for id in (*end_tokens(read.eos_token_id), *eos) if id < read.vocab_size})),
        stored_dtype=read.torch_dtype or read.dtype or "bfloat16",
    )


def _refuse_unsupported(read: LocalDecoderFields, source: str) -> None:
    if read.hidden_act != "silu":
        raise InputError(f"{source}: hidden_act={read.hidden_act!r} is not supported", hint="only silu is")
    if read.mlp_bias:
        raise InputError(f"{source}: mlp_bias is not supported")
    if read.use_sliding_window:
        raise InputError(f"{source}: sliding-window attention is not supported")
    if any(kind != "full_attention" for kind in read.layer_types or ()):
        raise InputError(f"{source}: layer_types other than full_attention are not supported")
    if read.num_experts or read.num_local_experts:
        raise InputError(f"{source}: mixture-of-experts models are not supported")


def _rope_scaling(scaling: dict[str, Any], source: str) -> dict[str, Any] | None:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise InputError(f"{source}: rope scaling {kind!r} is not supported", hint="default or llama3")
    read = parse_struct(scaling, Llama3Scaling, source=f"{source}, rope scaling")
    if read.low_freq_factor == read.high_freq_factor:
        raise InputError(f"{source}: low_freq_factor and high_freq_factor of the rope scaling are equal")
    return msgspec.structs.asdict(read)
