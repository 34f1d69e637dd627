# SPDX-License-Identifier: Apache-2.0
"""The GGUF container: named fields and tensors of one file, read within the file's own bounds.

Invariants
  1. Nothing is read beyond the end of the file, and no memory is taken for a length or a count before the bytes that it
     stands for are known to be there. A file that breaks this is an `InputError`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seer.errors import InputError
from seer.machine.given_files import check_given

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct format character, as the format defines them."""
_STRING, _ARRAY = 8, 9
"""GGUF value types."""
_MAX_RANK = 4
"""Of a tensor, by the format."""
_MAX_NESTING = 4
"""Of arrays in arrays: files in use have none."""
_FIELD_BYTES, _TENSOR_BYTES = 13, 24
"""The least that one field and one tensor's description take in the file."""


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
        self._path = path
        self._data = _map(path)
        self._at = 0
        if bytes(self._data[:4]) != b"GGUF":
            raise InputError(f"{path} is not a GGUF file")
        self._at = 4
        version, num_tensors, num_fields = self._unpack("<IQQ")
        if version != 3:
            raise InputError(f"{path} is GGUF version {version}, only version 3 is read")
        self._refuse_beyond(num_fields * _FIELD_BYTES + num_tensors * _TENSOR_BYTES)
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            self.fields[name] = self._value(self._unpack("<I")[0])
        self.tensors = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise InputError(f"{path}: general.alignment={alignment!r}", hint="1 to 1,048,576")
        self._start = -(-self._at // alignment) * alignment

    def read(self, tensor: GgufTensor) -> NDArray[np.float32]:
        """The tensor's values."""
        if tensor.kind not in _READERS:
            raise InputError(f"{tensor.name} has GGUF type {tensor.kind}, which is not supported")
        block_values, block_bytes, dequantize = _READERS[tensor.kind]
        count = math.prod(tensor.shape)
        if count % block_values:
            raise InputError(f"{tensor.name} has {count} values, and its type stores {block_values} together")
        start, size = self._start + tensor.offset, count // block_values * block_bytes
        if start + size > len(self._data):
            raise InputError(f"{self._path} ends inside {tensor.name}", hint="download the file again")
        # Copied: a view of another type needs an address that the type can have.
        return dequantize(self._data[start : start + size].copy()).reshape(tensor.shape)

    def _refuse_beyond(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self._at:
            raise InputError(
                f"{self._path} is cut off or damaged: {num_bytes} bytes are needed at {self._at}, "
                f"and it has {len(self._data)}",
                hint="download the file again",
            )

    def _take(self, num_bytes: int) -> bytes:
        self._refuse_beyond(num_bytes)
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at].tobytes()

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _string(self) -> str:
        return self._take(self._unpack("<Q")[0]).decode("utf-8", "replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and depth < _MAX_NESTING:
            return self._array(depth)
        if kind not in _SCALARS:
            raise InputError(f"{self._path} has a field of the unknown type {kind}")
        return self._unpack("<" + _SCALARS[kind])[0]

    def _array(self, depth: int) -> list[Any]:
        of, count = self._unpack("<IQ")
        if of in _SCALARS:
            self._refuse_beyond(count * struct.calcsize(_SCALARS[of]))
            return list(self._unpack(f"<{count}{_SCALARS[of]}"))
        self._refuse_beyond(count * 8)  # a string and an array begin with their length
        return [self._value(of, depth + 1) for _ in range(count)]

    def _tensor_info(self) -> GgufTensor:
        name = self._string()
        (rank,) = self._unpack("<I")
        if not 1 <= rank <= _MAX_RANK:
            raise InputError(f"{self._path}: tensor {name!r} has {rank} dimensions", hint=f"1 to {_MAX_RANK}")
        shape = self._unpack(f"<{rank}Q")
        if not all(shape):
            raise InputError(f"{self._path}: tensor {name!r} of shape {shape} has no values", hint="download it again")
        kind, offset = self._unpack("<IQ")
        return GgufTensor(name, tuple(reversed(shape)), kind, offset)


def _map(path: Path) -> NDArray[np.uint8]:
    try:
        return np.memmap(check_given(path), np.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise InputError(f"{path} cannot be read: {error}") from None


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


_READERS: dict[int, tuple[int, int, Callable[[Bytes], NDArray[np.float32]]]] = {
    0: (1, 4, lambda raw: raw.view(np.float32)),
    1: (1, 2, _f16),
    2: (32, 18, _q4_0),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}
"""GGUF type -> values of a block, bytes of a block, and how to read it."""
