# SPDX-License-Identifier: Apache-2.0
"""Reads what the adapter needs of a Hugging Face model folder before vLLM runs it: shapes, end tokens, identity.

It refuses no architecture: vLLM decides which models it can run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from seer.engine.hub_files import (
    DecoderFields,
    EndTokens,
    Experts,
    end_tokens,
    generation_end_tokens,
    read_config_object,
)
from seer.errors import InputError
from seer.machine.given_files import MODEL_JSON_BYTES, read_given
from seer.machine.json_files import parse_struct


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Facts of a model folder."""

    path: Path
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    """Those of the vocabulary: files name some that a small model does not have, and vLLM refuses them."""
    stored_dtype: str
    tied_head: bool
    """The output matrix is the embedding table."""
    architecture: str | None = None
    """The name of the model's class, as config.json has it."""
    latent_dim: int | None = None
    """Values that latent attention (MLA) keeps per token and layer, in place of keys and values of each head."""
    num_experts: int = 0
    """That a layer chooses from; 0 for a model that is no mixture of experts."""

    @property
    def weights_bytes(self) -> int:
        """Size of its safetensors files."""
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    def block_bytes(self, block_size: int, value_bytes: int, num_ranks: int = 1) -> int:
        """Memory of one KV block over all layers, on each of the tensor-parallel ranks."""
        if self.latent_dim is not None:
            return self.num_layers * self.latent_dim * block_size * value_bytes
        heads = max(1, self.num_kv_heads // num_ranks)
        return 2 * self.num_layers * heads * self.head_dim * block_size * value_bytes


def read_folder(path: Path) -> ModelFolder:
    """Read config.json and, where there is one, generation_config.json."""
    raw = read_config_object(path)
    source = str(path / "config.json")
    text = raw.get("text_config") or raw
    if not isinstance(text, dict):
        raise InputError(f"{source}: text_config holds {type(text).__name__}, not an object")
    read = parse_struct(text, DecoderFields, source=source)
    outer = parse_struct(raw, _OuterFields, source=source)
    latent = parse_struct(text, _LatentFields, source=source)
    tied = outer.tie_word_embeddings if read.tie_word_embeddings is None else read.tie_word_embeddings
    eos = {*end_tokens(outer.eos_token_id), *end_tokens(read.eos_token_id), *generation_end_tokens(path)}
    return ModelFolder(
        path=path,
        num_layers=read.num_hidden_layers,
        num_heads=read.num_attention_heads,
        num_kv_heads=read.num_key_value_heads or read.num_attention_heads,
        head_dim=read.head_width(source),
        vocab_size=read.vocab_size,
        max_model_len=read.max_position_embeddings,
        eos_token_ids=tuple(sorted(token for token in eos if token < read.vocab_size)),
        stored_dtype=outer.torch_dtype or outer.dtype or "bfloat16",
        tied_head=bool(tied),
        architecture=outer.architectures[0] if outer.architectures else None,
        latent_dim=latent.width,
        num_experts=parse_struct(text, _ExpertFields, source=source).number,
    )


class _OuterFields(msgspec.Struct, kw_only=True):
    """What models with images and text have outside of `text_config`."""

    architectures: list[str] = []
    eos_token_id: EndTokens = None
    tie_word_embeddings: bool | None = None
    torch_dtype: str | None = None
    dtype: str | None = None


class _LatentFields(msgspec.Struct, kw_only=True):
    """What models with latent attention (MLA) have."""

    kv_lora_rank: Annotated[int, msgspec.Meta(ge=1)] | None = None
    qk_rope_head_dim: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def width(self) -> int | None:
        """Values that are kept per token and layer."""
        return None if self.kv_lora_rank is None else self.kv_lora_rank + self.qk_rope_head_dim


class _ExpertFields(msgspec.Struct, kw_only=True):
    """How many experts a layer has: a field for each family of models."""

    num_experts: Experts | list[Experts] | None = None
    """A list has those for text first."""
    moe_num_experts: Experts | list[Experts] | None = None
    n_routed_experts: Experts | None = None
    num_local_experts: Experts | None = None

    @property
    def number(self) -> int:
        """0 without experts."""
        found = self.num_experts or self.moe_num_experts or self.n_routed_experts or self.num_local_experts or 0
        return found[0] if isinstance(found, list) else found


def weights_identity(folder: Path, tensors: Mapping[str, Any] | None) -> str:
    """A name that two instances share only if they run the same weights. Without tensors, it names the folder only."""
    from seer.engine.local.weights import fingerprint

    config = read_given(folder / "config.json", limit_bytes=MODEL_JSON_BYTES)
    sample = fingerprint(tensors) if tensors is not None else "dummy"
    return hashlib.blake2b(config + sample.encode(), digest_size=16).hexdigest()
