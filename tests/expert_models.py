# SPDX-License-Identifier: Apache-2.0
"""Tiny random models with experts, for vLLM: DeepSeek-V3's shape (latent attention, MLA) and Qwen3-MoE's.

Made by transformers from its own configurations, so their folders are those of real checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # logits spread over several units
    "dtype": "float32",
}
QWEN: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 8}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # with 64 the only size that vLLM's latent attention on a CPU takes: that of the real models
    "qk_rope_head_dim": 64,
    "q_lora_rank": None,  # as Moonlight has it
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc",  # vLLM looks for it, transformers does not
    "scoring_func": "sigmoid",
}


def qwen3_moe(seed: int = 0, **changes: Any) -> Any:
    """A model of transformers in memory; `changes` are of its configuration."""
    from transformers import Qwen3MoeConfig

    return _random(Qwen3MoeConfig(**COMMON | QWEN | changes), seed)


def deepseek(seed: int = 0, **changes: Any) -> Any:
    """The same of DeepSeek-V3's shape."""
    from transformers import DeepseekV3Config

    return _random(DeepseekV3Config(**COMMON | DEEPSEEK | changes), seed)


def make_qwen3_moe(folder: Path, seed: int = 0) -> Path:
    return _save(qwen3_moe(seed), folder)


def make_deepseek(folder: Path, seed: int = 0) -> Path:
    return _save(deepseek(seed), folder)


def _random(config: Any, seed: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # untyped
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return auto.from_config(config, dtype=torch.float32)


def _save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
