# SPDX-License-Identifier: Apache-2.0
"""A model folder of random weights, small enough for tests and smoke runs: `seer model get tiny`.

Its output is meaningless, but it is a real model of its family: every code path of the engine runs on it in
milliseconds, and its distributions are uneven enough to test sampling and stopping.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from seer.engine.local.model_config import config_from_dict
from seer.engine.local.weights import expected_shapes

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Class names of transformers, so that it and vLLM can load the folder too."""


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model."""
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "torch_dtype": "float32",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    } | changes


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights for a config.json; equal seeds give equal weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config_from_dict(config, source="tiny")).items():
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            # Large enough that logits spread over several units: otherwise all tokens would be about equally likely.
            scale = 0.3 if "embed" in name or "lm_head" in name else shape[-1] ** -0.5
            weights[name] = scale * torch.randn(shape, generator=generator)
    return weights


def make_tiny_model(folder: Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Write a model folder; `changes` are fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **changes)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tiny_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
