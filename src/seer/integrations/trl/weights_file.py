# SPDX-License-Identifier: Apache-2.0
"""A safetensors file that is written one tensor at a time: the library needs all of them in memory at once.

Invariants
  1. What the tensors need is reserved before the first is read, so that full memory is an error and no crash.
  2. Every tensor that was announced is written, with its shape and type, or there is an error.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from seer.errors import InputError

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "bool": "BOOL",
}
"""What the format calls the types of torch that weights have, and buffers such as a table of experts by token."""


class Like(NamedTuple):
    """Shape and type of a tensor that is written later."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


def layout_bytes(layout: Mapping[str, Like]) -> int:
    """What the tensors take together."""
    return sum(like.num_bytes for like in layout.values())


def write_one_by_one(path: Path, layout: Mapping[str, Like], tensors: Iterable[tuple[str, Any]]) -> None:
    """Write a file; `tensors` may come in any order, each is let go before the next is asked for."""
    header, places = _header(layout)
    missing = set(layout)
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, len(header) + layout_bytes(layout))
        file.write(header)
        for name, tensor in tensors:
            like = layout[name]
            assert (tuple(tensor.shape), tensor.dtype) == like, f"{name} was announced as {like}"
            file.seek(len(header) + places[name])
            file.write(_bytes(tensor))
            missing.remove(name)
    assert not missing, f"{len(missing)} tensors were not written"


def _header(layout: Mapping[str, Like]) -> tuple[bytes, dict[str, int]]:
    """The header, and where each tensor begins after it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    at = 0
    # Wide types first, as the library does: so each tensor is aligned to its type.
    for name, like in sorted(layout.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        places[name] = at
        entries[name] = {"dtype": _name(name, like), "shape": like.shape, "data_offsets": (at, at + like.num_bytes)}
        at += like.num_bytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def _name(name: str, like: Like) -> str:
    known = str(like.dtype).removeprefix("torch.")
    if known not in _NAMES:
        raise InputError(f"{name} is of type {known}", hint=f"weights can be {', '.join(_NAMES)}")
    return _NAMES[known]


def _bytes(tensor: Any) -> memoryview:
    import torch

    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())
