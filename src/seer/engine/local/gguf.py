# SPDX-License-Identifier: Apache-2.0
"""Write the GGUF files that small models are packaged in as Hugging Face folders.

Reads only what those files use: the Llama family, tensor types F32, F16, Q8_0, Q4_0 and Q4_1, byte-level BPE
tokenizers. The values equal llama.cpp's own dequantisation, rounded to bf16 once.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from seer.engine.hub_files import Context, Epsilon, Heads, Layers, RopeBase, Width
from seer.engine.local.gguf_file import GgufFile
from seer.errors import InputError
from seer.machine.json_files import parse_struct
from seer.ranges import TokenId

__all__ = ["GgufFile", "write_folder"]

_WEIGHT_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF name -> Hugging Face name, without the layer's prefix."""
_CONTROL_TOKEN = 3
"""GGUF token type of special tokens."""


class LlamaFields(msgspec.Struct, kw_only=True):
    """The fields that are read of a llama model, by their GGUF names."""

    heads: Heads = msgspec.field(name="llama.attention.head_count")
    kv_heads: Heads = msgspec.field(name="llama.attention.head_count_kv")
    hidden: Width = msgspec.field(name="llama.embedding_length")
    intermediate: Width = msgspec.field(name="llama.feed_forward_length")
    layers: Layers = msgspec.field(name="llama.block_count")
    context: Context = msgspec.field(name="llama.context_length")
    epsilon: Epsilon = msgspec.field(name="llama.attention.layer_norm_rms_epsilon")
    rope_base: RopeBase = msgspec.field(name="llama.rope.freq_base")
    model: str = msgspec.field(name="tokenizer.ggml.model")
    pre: str = msgspec.field(name="tokenizer.ggml.pre", default="")
    tokens: list[str] = msgspec.field(name="tokenizer.ggml.tokens")
    token_types: list[int] = msgspec.field(name="tokenizer.ggml.token_type")
    merges: list[str] = msgspec.field(name="tokenizer.ggml.merges")
    bos: TokenId | None = msgspec.field(name="tokenizer.ggml.bos_token_id", default=None)
    eos: TokenId = msgspec.field(name="tokenizer.ggml.eos_token_id")
    padding: TokenId | None = msgspec.field(name="tokenizer.ggml.padding_token_id", default=None)
    chat_template: str = msgspec.field(name="tokenizer.chat_template", default="")

    def check(self) -> None:
        """Refuse fields that contradict one another."""
        if len(self.tokens) != len(self.token_types):
            raise InputError(f"GGUF has {len(self.tokens)} tokens and the types of {len(self.token_types)}")
        if max(self.bos or 0, self.eos, self.padding or 0) >= len(self.tokens):
            raise InputError(f"GGUF names a special token beyond its {len(self.tokens)} tokens")
        if self.hidden % self.heads or not all(" " in merge for merge in self.merges):
            raise InputError("GGUF has a hidden size that its heads do not divide, or a merge that is no pair")
        if self.model != "gpt2":
            raise InputError(f"GGUF tokenizer {self.model!r} is not supported", hint="only gpt2 is")


def write_folder(gguf: GgufFile, folder: Path) -> None:
    """Write config.json, weights in bf16, tokenizer and chat template."""
    family = gguf.fields.get("general.architecture")
    if family != "llama":
        raise InputError(f"GGUF architecture {family!r} is not supported", hint="only llama is")
    fields = parse_struct(gguf.fields, LlamaFields, source="GGUF", hint="download the file again")
    fields.check()
    folder.mkdir(parents=True, exist_ok=True)
    weights = _weights(gguf, fields)
    config = _config(fields, tied="lm_head.weight" not in weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(fields), ensure_ascii=False))
    special = {"bos_token": fields.bos, "eos_token": fields.eos, "pad_token": fields.padding}
    names = {key: fields.tokens[token] for key, token in special.items() if token is not None}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    if fields.chat_template:
        (folder / "chat_template.jinja").write_text(fields.chat_template)


def _weights(gguf: GgufFile, fields: LlamaFields) -> dict[str, torch.Tensor]:
    weights = {}
    for tensor in gguf.tensors:
        stem, _, kind = tensor.name.rpartition(".")
        block, _, leaf = stem.rpartition(".")
        if leaf not in _WEIGHT_NAMES:
            raise InputError(f"GGUF tensor {tensor.name} has no place in a llama model")
        values = gguf.read(tensor)
        if leaf in ("attn_q", "attn_k"):
            values = _unpermute(tensor.name, values, fields.heads if leaf == "attn_q" else fields.kv_heads)
        layer = re.fullmatch(r"blk\.(\d+)", block)
        at = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{at}{_WEIGHT_NAMES[leaf]}.{kind}"] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    return weights


def _unpermute(name: str, weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's rotary reordering of the query and key rows."""
    if weight.ndim != 2 or weight.shape[0] % (2 * num_heads):
        raise InputError(f"GGUF tensor {name} has shape {weight.shape}, which {num_heads} heads do not divide")
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _config(fields: LlamaFields, *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": len(fields.tokens),
        "hidden_size": fields.hidden,
        "intermediate_size": fields.intermediate,
        "num_hidden_layers": fields.layers,
        "num_attention_heads": fields.heads,
        "num_key_value_heads": fields.kv_heads,
        "head_dim": fields.hidden // fields.heads,
        "max_position_embeddings": fields.context,
        "rms_norm_eps": fields.epsilon,
        "rope_theta": fields.rope_base,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "eos_token_id": fields.eos,
    }


def _tokenizer(fields: LlamaFields) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    splitters: list[dict[str, Any]] = [byte_level]
    if fields.pre == "smollm":  # every digit is a token of its own
        splitters.insert(0, {"type": "Digits", "individual_digits": True})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, (token, kind) in enumerate(zip(fields.tokens, fields.token_types, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitters},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(fields.tokens)},
            "merges": [merge.split(" ", 1) for merge in fields.merges],
        },
    }
