# SPDX-License-Identifier: Apache-2.0
"""Reads what the adapter needs of a Hugging Face model folder before vLLM runs it: shapes, end tokens, identity.

It refuses no architecture: vLLM decides which models it can run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seer.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Facts of a model folder."""

    path: Path
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    stored_dtype: str
    tied_head: bool
    """The output matrix is the embedding table."""

    def block_bytes(self, block_size: int, value_bytes: int) -> int:
        """Memory of one KV block over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * block_size * value_bytes


def read_folder(path: Path) -> ModelFolder:
    """Read config.json and, where there is one, generation_config.json."""
    raw = _read_object(path / "config.json")
    if raw is None:
        raise InputError(f"{path} holds no config.json", hint="a Hugging Face folder has config.json and *.safetensors")
    text = raw.get("text_config") or raw
    try:
        heads: int = text["num_attention_heads"]
        head_dim = text.get("head_dim") or text["hidden_size"] // heads
        folder = ModelFolder(
            path=path,
            num_layers=text["num_hidden_layers"],
            num_kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            vocab_size=text["vocab_size"],
            max_model_len=text["max_position_embeddings"],
            eos_token_ids=tuple(
                sorted({*_ids(raw), *_ids(text), *_ids(_read_object(path / "generation_config.json") or {})})
            ),
            stored_dtype=str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16"),
            tied_head=bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))),
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{path / 'config.json'} does not describe a decoder: {error}") from None
    return folder


def weights_identity(folder: Path, tensors: Mapping[str, Any] | None) -> str:
    """A name that two instances share only if they run the same weights. Without tensors, it names the folder only."""
    from seer.engine.local.weights import fingerprint

    config = (folder / "config.json").read_bytes()
    sample = fingerprint(tensors) if tensors is not None else "dummy"
    return hashlib.blake2b(config + sample.encode(), digest_size=16).hexdigest()


def _read_object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds {type(raw).__name__}, not an object")
    return raw


def _ids(raw: dict[str, Any]) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
