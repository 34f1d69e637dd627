# SPDX-License-Identifier: Apache-2.0
"""A tiny model with random weights and a tokenizer of fifteen tokens, for sums of small numbers."""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = ["<pad>", "<eos>", *"0123456789+-="]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(CHARACTERS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tiny_model(seed: int) -> LlamaForCausalLM:
    """A Llama with 0.1 M parameters."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(CHARACTERS),
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
