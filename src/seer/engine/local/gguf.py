# SPDX-License-Identifier: Apache-2.0
"""Read the GGUF files that small models are packaged in, and write them as Hugging Face folders.

Reads only what those files use: the Llama family, tensor types F32, F16, Q8_0, Q4_0 and Q4_1, byte-level BPE
tokenizers. The values equal llama.cpp's own dequantisation, rounded to bf16 once.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from seer.errors import InputError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct format character, as the format defines them."""
_STRING, _ARRAY = 8, 9
"""GGUF value types."""
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


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor is in the file, and its shape and type."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in PyTorch."""
    kind: int
    offset: int


class GgufFile:
    """A GGUF file: its fields, and its tensors one at a time."""

    def __init__(self, path: Path) -> None:
        self._data = np.memmap(path, np.uint8, mode="r")
        self._at = 0
        if bytes(self._data[:4]) != b"GGUF":
            raise InputError(f"{path} is not a GGUF file")
        self._at = 4
        version, num_tensors, num_fields = self._unpack("<IQQ")
        if version != 3:
            raise InputError(f"{path} is GGUF version {version}, only version 3 is read")
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            self.fields[name] = self._value(self._unpack("<I")[0])
        self.tensors = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        self._start = -(-self._at // alignment) * alignment

    def read(self, tensor: GgufTensor) -> NDArray[np.float32]:
        """The tensor's values."""
        if tensor.kind not in _READERS:
            raise InputError(f"{tensor.name} has GGUF type {tensor.kind}, which is not supported")
        size, dequantize = _READERS[tensor.kind]
        count = int(np.prod(tensor.shape))
        start = self._start + tensor.offset
        return dequantize(self._data[start : start + int(count * size)]).reshape(tensor.shape)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        values = struct.unpack(form, self._data[self._at : self._at + size].tobytes())
        self._at += size
        return values

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        text = self._data[self._at : self._at + length].tobytes().decode("utf-8", "replace")
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            of, count = self._unpack("<IQ")
            if of in _SCALARS:
                return list(self._unpack(f"<{count}{_SCALARS[of]}"))
            return [self._value(of) for _ in range(count)]
        return self._unpack("<" + _SCALARS[kind])[0]

    def _tensor_info(self) -> GgufTensor:
        name = self._string()
        (rank,) = self._unpack("<I")
        shape = self._unpack(f"<{rank}Q")
        kind, offset = self._unpack("<IQ")
        return GgufTensor(name, tuple(reversed(shape)), kind, offset)


def write_folder(gguf: GgufFile, folder: Path) -> None:
    """Write config.json, weights in bf16, tokenizer and chat template."""
    family = gguf.fields["general.architecture"]
    if family != "llama":
        raise InputError(f"GGUF architecture {family!r} is not supported", hint="only llama is")
    folder.mkdir(parents=True, exist_ok=True)
    weights = _weights(gguf)
    config = _config(gguf, tied="lm_head.weight" not in weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(gguf), ensure_ascii=False))
    tokens = gguf.fields["tokenizer.ggml.tokens"]
    names = {
        key: tokens[gguf.fields[f"tokenizer.ggml.{field}_token_id"]]
        for key, field in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"))
        if f"tokenizer.ggml.{field}_token_id" in gguf.fields
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    template = gguf.fields.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template)


def _weights(gguf: GgufFile) -> dict[str, torch.Tensor]:
    heads = gguf.fields["llama.attention.head_count"]
    kv_heads = gguf.fields["llama.attention.head_count_kv"]
    weights = {}
    for tensor in gguf.tensors:
        stem, _, kind = tensor.name.rpartition(".")
        block, _, leaf = stem.rpartition(".")
        if leaf not in _WEIGHT_NAMES:
            raise InputError(f"GGUF tensor {tensor.name} has no place in a llama model")
        values = gguf.read(tensor)
        if leaf in ("attn_q", "attn_k"):
            values = _unpermute(values, heads if leaf == "attn_q" else kv_heads)
        layer = re.fullmatch(r"blk\.(\d+)", block)
        at = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{at}{_WEIGHT_NAMES[leaf]}.{kind}"] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    return weights


def _unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's rotary reordering of the query and key rows."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _config(gguf: GgufFile, *, tied: bool) -> dict[str, Any]:
    def field(key: str) -> Any:
        return gguf.fields[f"llama.{key}"]

    heads, hidden = field("attention.head_count"), field("embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": len(gguf.fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "eos_token_id": gguf.fields["tokenizer.ggml.eos_token_id"],
    }


def _tokenizer(gguf: GgufFile) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE."""
    fields = gguf.fields
    if fields["tokenizer.ggml.model"] != "gpt2":
        raise InputError(f"GGUF tokenizer {fields['tokenizer.ggml.model']!r} is not supported", hint="only gpt2 is")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    splitters: list[dict[str, Any]] = [byte_level]
    if fields.get("tokenizer.ggml.pre") == "smollm":  # every digit is a token of its own
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
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
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
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"]],
        },
    }


# Dequantisation: blocks of 32 values share a scale, and some an offset.

Bytes = NDArray[np.uint8]


def _f16(raw: Bytes) -> NDArray[np.float32]:
    return raw.view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> NDArray[np.float32]:
    """16 bytes hold 32 values: the low halves first, then the high ones."""
    values: NDArray[np.float32] = np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32)
    return values


def _q4_0(raw: Bytes) -> NDArray[np.float32]:
    blocks = raw.reshape(-1, 18)
    return (_nibbles(blocks[:, 2:]) - 8) * _f16(blocks[:, :2].copy())


def _q4_1(raw: Bytes) -> NDArray[np.float32]:
    blocks = raw.reshape(-1, 20)
    return _nibbles(blocks[:, 4:]) * _f16(blocks[:, :2].copy()) + _f16(blocks[:, 2:4].copy())


def _q8_0(raw: Bytes) -> NDArray[np.float32]:
    blocks = raw.reshape(-1, 34)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _f16(blocks[:, :2].copy())


_READERS: dict[int, tuple[float, Callable[[Bytes], NDArray[np.float32]]]] = {
    0: (4, lambda raw: raw.view(np.float32)),
    1: (2, _f16),
    2: (18 / 32, _q4_0),
    3: (20 / 32, _q4_1),
    8: (34 / 32, _q8_0),
}
"""GGUF type -> bytes per value, and how to read it."""
