# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file: names, types and shapes of its tensors, without the library and without their data.

Invariants
  1. No more is read than the file holds and `MAX_HEADER_BYTES` allow, whatever length the file states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from seer.errors import InputError
from seer.machine.given_files import open_given
from seer.machine.json_files import UNREADABLE
from seer.ranges import INT64_MAX

MAX_HEADER_BYTES = 100_000_000
"""The limit of the library itself."""

Extent = Annotated[int, Meta(ge=0, le=INT64_MAX)]


class TensorHeader(msgspec.Struct):
    """One tensor of the file."""

    dtype: str
    shape: Annotated[list[Extent], Meta(max_length=16)]
    data_offsets: tuple[Extent, Extent]


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Every tensor by name; InputError if the file is no safetensors file."""
    try:
        with open_given(path) as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes > MAX_HEADER_BYTES:
                raise InputError(
                    f"{path} states a header of {num_bytes} bytes",
                    hint=f"at most {MAX_HEADER_BYTES:,}: download it again",
                )
            return parse_header(file.read(num_bytes), source=str(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def parse_header(header: bytes, *, source: str) -> dict[str, TensorHeader]:
    """The tensors that a header describes."""
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        return {
            name: msgspec.json.decode(tensor, type=TensorHeader)
            for name, tensor in raw.items()
            if name != "__metadata__"
        }
    except UNREADABLE as error:
        raise InputError(f"{source} is not a safetensors file: {error}", hint="download it again") from None
