# SPDX-License-Identifier: Apache-2.0
"""Read and check weights: safetensors files, a trainer's tensors, or a trainer's GPU memory.

Files are memory-mapped, so the instances of one machine read one copy from the page cache. Joined, packed or converted
matrices are private to a process, or shared through shared_matrices.py.

Invariants
  1. Every tensor the model needs is present with the expected shape and finite values, and no unknown one is. Otherwise
     an error names the tensor before any weight in use changes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from seer.engine.gpu_handles import SUFFIX, open_handles
from seer.engine.hub_files import weight_files
from seer.engine.local.model_config import ModelConfig
from seer.errors import InputError
from seer.machine.given_files import check_given

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers of old checkpoints; rotary.py computes them."""


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by name; each is read on access, and once: the library leaks with every read."""

    def __init__(self, paths: list[Path]) -> None:
        self._file_of: dict[str, Path] = {}
        self._read: dict[str, torch.Tensor] = {}
        self._open: dict[Path, Any] = {}
        for path in paths:
            try:
                self._open[path] = safe_open(str(check_given(path)), framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path} cannot be read as safetensors: {error}") from None
            for name in self._open[path].keys():  # noqa: SIM118 - a file handle, not a dict
                self._file_of[name] = path

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._read:
            self._read[name] = self._open[self._file_of[name]].get_tensor(name)
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    @property
    def paths(self) -> list[Path]:
        """The files."""
        return list(self._open)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        return tuple(self._open[self._file_of[name]].get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def open_weights(source: Path | Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Tensors by name, from a folder, a safetensors file, handles of another process's GPU memory, or a mapping."""
    if not isinstance(source, Path):
        return source
    if source.suffix == SUFFIX:
        return open_handles(source)
    if source.is_file():
        return TensorFiles([source])
    paths = weight_files(source)
    if paths is None:
        paths = sorted(source.glob("*.safetensors"))
    if not paths:
        raise InputError(f"{source} has no *.safetensors files")
    return TensorFiles(paths)


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of the first values of every tensor, without reading all of them.

    A training step changes nearly every value, so this is enough to distinguish KV of different weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        sample = tensors[name].reshape(-1)[:64].detach().to(device="cpu", dtype=torch.float32)
        digest.update(name.encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model by its Hugging Face name."""
    c = config
    queries, pairs = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    if not c.tied_head:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    for layer in range(c.num_layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (c.hidden_size,)
        for name, width in (("q_proj", queries), ("k_proj", pairs), ("v_proj", pairs)):
            shapes[f"{at}self_attn.{name}.weight"] = (width, c.hidden_size)
            if c.qkv_bias:
                shapes[f"{at}self_attn.{name}.bias"] = (width,)
        if c.qk_norm:
            shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (c.head_dim,)
        shapes[at + "self_attn.o_proj.weight"] = (c.hidden_size, queries)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{at}mlp.{name}.weight"] = (c.intermediate_size, c.hidden_size)
        shapes[at + "mlp.down_proj.weight"] = (c.hidden_size, c.intermediate_size)
    return shapes


def check(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are not exactly this model's."""
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise InputError(f"the weights lack {missing[0]}" + _and_more(missing))
    spare = [name for name in tensors if name not in expected and not _ignored(name, config)]
    if spare:
        raise InputError(
            f"the weights contain {spare[0]}, which is not part of this {config.family} model" + _and_more(spare)
        )
    if isinstance(tensors, TensorFiles):
        return  # shapes are checked when each tensor is read, so that files are read once
    for name, shape in expected.items():
        check_shape(name, tensors[name], shape)


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor, if it has the expected shape."""
    if tuple(tensor.shape) != shape:
        raise InputError(f"{name} has shape {list(tensor.shape)}, config.json says {list(shape)}")
    return tensor


def check_finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if it has no NaN and no infinity. It is checked on its own device."""
    if not tensor.is_floating_point():
        return tensor
    values = tensor.float() if tensor.element_size() == 1 else tensor  # PyTorch does not sum 8-bit floats
    # A sum takes a small part of the time of `isfinite`, and a NaN or an infinity always shows in it. A sum of finite
    # values can overflow too, so a suspicious tensor is then checked value by value.
    if not math.isfinite(values.sum(dtype=torch.float32).item()):
        num_bad = values.numel() - int(values.isfinite().sum())
        if num_bad:
            raise InputError(
                f"{name} has {num_bad} values of {values.numel()} that are NaN or infinite in {_name(tensor.dtype)}",
                hint="the trainer diverged: load weights from before that"
                + (", or use a dtype with a larger range" if tensor.dtype == torch.float16 else ""),
            )
    return tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ignored(name: str, config: ModelConfig) -> bool:
    return name.endswith(IGNORED_SUFFIXES) or (config.tied_head and name == "lm_head.weight")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
