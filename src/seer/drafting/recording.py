# SPDX-License-Identifier: Apache-2.0
"""Recorded groups: the `.npz` form in which sampled responses are stored for offline study.

Arrays: `group_sizes` (responses per group), `lengths` (one per response, group after group), `tokens` (all
responses, concatenated); optionally `prompt_lengths` and `prompts`. A two-dimensional `lengths` (groups x
responses) may stand in for `group_sizes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seer.errors import InputError
from seer.machine.npz_files import read_integers

Tokens = NDArray[np.int32]
_ARRAYS = ("lengths", "group_sizes", "tokens", "prompt_lengths", "prompts")


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """One prompt and the responses sampled for it."""

    prompt: Tokens
    responses: tuple[Tokens, ...]


def read_groups(path: Path) -> list[RecordedGroup]:
    """Read every group of a recording; InputError if the file is not one."""
    return _groups(read_integers(path, _ARRAYS, hint="expected an .npz with group_sizes, lengths and tokens"), path)


def _groups(arrays: dict[str, NDArray[np.int64]], path: Path) -> list[RecordedGroup]:
    lengths = _array(arrays, "lengths", path)
    square = lengths.ndim == 2
    sizes = np.full(len(lengths), lengths.shape[1]) if square else _array(arrays, "group_sizes", path)
    _refuse_shapes(arrays | {"group_sizes": sizes}, path)
    responses = _split(_array(arrays, "tokens", path), lengths.ravel(), "tokens", path)
    if sizes.sum() != len(responses):
        raise InputError(f"{path}: group_sizes add up to {sizes.sum()}, but there are {len(responses)} lengths")
    prompt_lengths = arrays.get("prompt_lengths", np.zeros(len(sizes), np.int64))
    if len(prompt_lengths) != len(sizes):
        raise InputError(f"{path}: {len(prompt_lengths)} prompt_lengths for {len(sizes)} groups")
    prompts = _split(arrays.get("prompts", np.zeros(0, np.int64)), prompt_lengths, "prompts", path)
    ends = np.cumsum(sizes)
    return [
        RecordedGroup(prompt, tuple(responses[end - size : end]))
        for prompt, size, end in zip(prompts, sizes, ends, strict=True)
    ]


def _refuse_shapes(arrays: Mapping[str, NDArray[np.int64]], path: Path) -> None:
    for name, array in arrays.items():
        if array.ndim != 1 and not (name == "lengths" and array.ndim == 2):
            raise InputError(f"{path}: {name} has {array.ndim} dimensions", hint="expected 1, or 2 for lengths")
    sizes = arrays["group_sizes"]
    if sizes.size and (sizes.min() < 0 or sizes.max() > arrays["lengths"].size):
        raise InputError(f"{path}: a group size is negative or beyond the {arrays['lengths'].size} responses")


def _array(arrays: Mapping[str, NDArray[np.int64]], name: str, path: Path) -> NDArray[np.int64]:
    if name not in arrays:
        raise InputError(f"{path} has no array {name!r}", hint=f"it has {', '.join(sorted(arrays)) or 'none'}")
    return arrays[name]


def _split(flat: NDArray[np.int64], lengths: NDArray[np.int64], name: str, path: Path) -> list[Tokens]:
    if lengths.size and (lengths.min() < 0 or lengths.max() > len(flat)):  # so that their sum cannot overflow
        raise InputError(f"{path}: a length of {name} is negative or beyond its {len(flat)} entries")
    if lengths.sum() != len(flat):
        raise InputError(f"{path}: lengths of {name} add up to {lengths.sum()}, but it has {len(flat)} entries")
    if flat.size and (flat.min() < 0 or flat.max() > np.iinfo(np.int32).max):
        raise InputError(f"{path}: {name} holds a value that is no token id")
    return np.split(flat.astype(np.int32), np.cumsum(lengths)[:-1]) if len(lengths) else []
