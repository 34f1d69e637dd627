# SPDX-License-Identifier: Apache-2.0
"""The decoder of the dense Llama, Qwen2 and Qwen3 families: one model with three switches.

A layer is attention and a gated MLP around a residual stream that is updated in place:

    hidden -> norm -> qkv -> rotate, store -> attend -> out -> + -> norm -> gate_up -> silu * -> down -> +

The switches: a bias on qkv (Qwen2), norms on the heads of q and k (Qwen3), and whether the output matrix is
the embedding table.

Invariants
  1. `forward` reads and writes KV through `ops` only, and changes nothing else.
  2. `load` returns a complete set of weights or raises. It does not change a set in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from seer.engine.local.batch import Batch
from seer.engine.local.model_config import ModelConfig
from seer.engine.local.ops import Linear, MakeLinear, Ops, replaced
from seer.engine.local.weights import check, check_finite, check_shape, expected_shapes


@dataclass(slots=True)
class Layer:
    """The weights of one layer."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(slots=True)
class ModelWeights:
    """All weights, in the form that `ops` multiplies with. Instances of one process may share them."""

    embedding: torch.Tensor
    layers: list[Layer]
    final_norm: torch.Tensor
    head: Linear

    def replace(self, other: ModelWeights) -> None:
        """Take `other`'s values. Every instance that shares this object sees them."""
        self.embedding = replaced(self.embedding, other.embedding)
        self.final_norm = replaced(self.final_norm, other.final_norm)
        self.head.replace(other.head)
        for old, new in zip(self.layers, other.layers, strict=True):
            old.attention_norm = replaced(old.attention_norm, new.attention_norm)
            old.mlp_norm = replaced(old.mlp_norm, new.mlp_norm)
            if old.q_norm is not None and new.q_norm is not None:
                old.q_norm = replaced(old.q_norm, new.q_norm)
            if old.k_norm is not None and new.k_norm is not None:
                old.k_norm = replaced(old.k_norm, new.k_norm)
            for name in ("qkv", "out", "gate_up", "down"):
                getattr(old, name).replace(getattr(new, name))


def load(
    config: ModelConfig,
    linear: MakeLinear,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> ModelWeights:
    """Check, join and convert weights. `linear` is called for the matrices in a fixed order."""
    check(config, tensors)
    shapes = expected_shapes(config)

    def get(name: str) -> torch.Tensor:
        stored = check_shape(name, tensors[name], shapes[name])
        # After the conversion: a value can overflow in a smaller dtype.
        return check_finite(name, stored.to(device=device, dtype=dtype).contiguous())

    def join(at: str, names: tuple[str, ...], kind: str = "weight") -> torch.Tensor:
        return torch.cat([get(f"{at}{name}.{kind}") for name in names])

    layers = []
    for index in range(config.num_layers):
        at = f"model.layers.{index}."
        heads = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        layers.append(
            Layer(
                attention_norm=get(at + "input_layernorm.weight"),
                qkv=linear(join(at, heads), join(at, heads, "bias") if config.qkv_bias else None),
                q_norm=get(at + "self_attn.q_norm.weight") if config.qk_norm else None,
                k_norm=get(at + "self_attn.k_norm.weight") if config.qk_norm else None,
                out=linear(get(at + "self_attn.o_proj.weight"), None),
                mlp_norm=get(at + "post_attention_layernorm.weight"),
                gate_up=linear(join(at, ("mlp.gate_proj", "mlp.up_proj")), None),
                down=linear(get(at + "mlp.down_proj.weight"), None),
            )
        )
    embedding = get("model.embed_tokens.weight")
    head = embedding if config.tied_head else get("lm_head.weight")
    return ModelWeights(embedding, layers, get("model.norm.weight"), linear(head, None, wide=True))


class Model:
    """Weights and the arithmetic that uses them."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: ModelWeights) -> None:
        self.config = config
        self.ops = ops
        self.weights = weights

    def forward(self, batch: Batch, tables: torch.Tensor) -> torch.Tensor:
        """Compute the batch and store its KV; return fp32 logits of the rows to sample from."""
        self.ops.begin(batch, tables)
        hidden = self._embed(batch)
        change = self.run_layers(hidden)
        if not len(batch.sample_rows):
            return hidden.new_zeros((0, self.config.vocab_size), dtype=torch.float32)
        hidden, change = (self._sampled_rows(batch, rows) for rows in (hidden, change))
        return self.logits(hidden, change)

    def run_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run every layer over the residual stream, in place; return the last change, not yet added."""
        ops, eps = self.ops, self.config.rms_norm_eps
        change: torch.Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            qkv = layer.qkv(ops.add_rms_norm(change, hidden, layer.attention_norm, eps))
            ops.rotate_store(index, qkv, layer.q_norm, layer.k_norm, eps)
            change = layer.out(ops.attend(index, qkv))
            normed = ops.add_rms_norm(change, hidden, layer.mlp_norm, eps)
            change = layer.down(ops.silu_mul(layer.gate_up(normed)))
        assert change is not None, "a model has at least one layer"
        return change

    def logits(self, hidden: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        """fp32 logits of rows of the residual stream."""
        normed = self.ops.add_rms_norm(change, hidden, self.weights.final_norm, self.config.rms_norm_eps)
        return self.weights.head(normed).float()

    def _embed(self, batch: Batch) -> torch.Tensor:
        """Embeddings of the batched tokens."""
        embedding = self.weights.embedding
        return embedding[torch.from_numpy(batch.tokens).to(embedding.device)]

    def _sampled_rows(self, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
        """Only rows that are sampled from go through the output matrix, the largest of all."""
        if len(batch.sample_rows) == len(rows):
            return rows
        return rows[torch.from_numpy(batch.sample_rows).to(rows.device)]
