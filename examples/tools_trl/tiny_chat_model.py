# SPDX-License-Identifier: Apache-2.0
"""A tiny model with random weights and a chat template, whose tokens are digits and signs."""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TOKENS = ["<pad>", "<eos>", "<user>", "<tool>", "<model>", *"0123456789+-"]
TEMPLATE = (
    "{% for m in messages %}{{ '<model>' if m.role == 'assistant' else '<' + m.role + '>' }}{{ m.content }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and one for each role."""
    made = Tokenizer(models.WordLevel({text: i for i, text in enumerate(TOKENS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(name, special=True) for name in TOKENS[:5]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_model(seed: int) -> LlamaForCausalLM:
    """A Llama with 0.1 M parameters."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.1,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
