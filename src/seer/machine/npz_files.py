# SPDX-License-Identifier: Apache-2.0
"""Arrays of whole numbers from .npz archives that others wrote: one way for every such file.

Invariants
  1. Nothing is unpickled, and an archive that would unpack to more than `MAX_BYTES` is refused before it is unpacked.
  2. Every array holds integers that fit 64 bits with a sign. Everything else is an `InputError` that names the file.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from seer.errors import InputError
from seer.machine.sizes import show_size

MAX_BYTES = 4 << 30
"""Unpacked: a billion token ids."""
_DAMAGES = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    SyntaxError,
    OverflowError,
    MemoryError,
    RecursionError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What zipfile and numpy raise for damaged archives: also those that are encrypted or lie about their sizes."""


def read_integers(path: Path, names: Sequence[str], *, hint: str) -> dict[str, NDArray[np.int64]]:
    """Those of the named arrays that the file has."""
    if not path.is_file():
        raise InputError(f"no such file: {path}", hint=hint)
    try:
        _refuse_sizes(path, names)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in names if name in file.files}
    except _DAMAGES as error:
        raise InputError(f"{path} is not an .npz archive, or damaged: {error}", hint=hint) from None
    return {name: _integers(array, f"{path}: {name}") for name, array in arrays.items()}


def _refuse_sizes(path: Path, names: Sequence[str]) -> None:
    """Refuse what does not fit, by the archive's directory and the arrays' own headers."""
    with zipfile.ZipFile(path) as archive:
        members = [info for info in archive.infolist() if info.filename.removesuffix(".npy") in names]
        unpacked = sum(info.file_size for info in members)
        if unpacked > MAX_BYTES:
            raise InputError(f"{path} unpacks to {show_size(unpacked)}", hint=f"at most {show_size(MAX_BYTES)}")
        for info in members:
            with archive.open(info) as member:
                shape, dtype = _header(member)
            if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > info.file_size:
                raise InputError(f"{path}: {info.filename} states the shape {shape}, which it does not hold")


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    form: Any = np.lib.format  # its functions have no types
    read = form.read_array_header_1_0 if form.read_magic(member) == (1, 0) else form.read_array_header_2_0
    shape, _, dtype = read(member)
    return shape, dtype


def _integers(array: NDArray[np.generic], what: str) -> NDArray[np.int64]:
    if array.dtype.kind not in "iu":
        raise InputError(f"{what} holds {array.dtype}, not integers", hint="save it as int32")
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise InputError(f"{what} holds {int(array.max())}, which does not fit 64 bits with a sign")
    return array.astype(np.int64)
