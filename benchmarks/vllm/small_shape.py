# SPDX-License-Identifier: Apache-2.0
"""A made-up Llama in float32 for equality.py: small enough that rounding hardly matters, with tokens that repeat.

    python benchmarks/vllm/small_shape.py DIR

Few tokens are likely and the last token decides most, so siblings repeat each other and drafts are accepted. Its
vocabulary is SmolLM2's, so that prompts of that recording fit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY = 256, 512, 3, 4, 2, 49152
FIRST_LIKELY, LAST_LIKELY = 3, 67
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "vocab_size": VOCABULARY,
    "tie_word_embeddings": False, "hidden_size": WIDTH, "head_dim": WIDTH // HEADS, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": INNER, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "attention_bias": False,
    "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, std: float = 0.06) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    found = {"model.embed_tokens.weight": drawn(VOCABULARY, WIDTH, std=1.0), "model.norm.weight": torch.ones(WIDTH)}
    head = drawn(VOCABULARY, WIDTH, std=0.45)
    head[LAST_LIKELY:], head[:FIRST_LIKELY] = 0, 0
    found["lm_head.weight"] = head
    kv_width = WIDTH // HEADS * KV_HEADS
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        found |= {
            at + "input_layernorm.weight": torch.ones(WIDTH),
            at + "post_attention_layernorm.weight": torch.ones(WIDTH),
            at + "self_attn.q_proj.weight": drawn(WIDTH, WIDTH),
            at + "self_attn.k_proj.weight": drawn(kv_width, WIDTH),
            at + "self_attn.v_proj.weight": drawn(kv_width, WIDTH),
            at + "self_attn.o_proj.weight": drawn(WIDTH, WIDTH, std=0.03),
            at + "mlp.gate_proj.weight": drawn(INNER, WIDTH),
            at + "mlp.up_proj.weight": drawn(INNER, WIDTH),
            at + "mlp.down_proj.weight": drawn(WIDTH, INNER, std=0.03),
        }
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    folder = options.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))


if __name__ == "__main__":
    main()
