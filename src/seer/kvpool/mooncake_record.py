# SPDX-License-Identifier: Apache-2.0
"""The form of a block inside Mooncake: its name, and a footer that identifies it.

Mooncake stores bytes and checks nothing. So each block ends in a footer with its length, its checksum and its
key; a record without a matching footer is refused.

Invariants
  1. `unseal` copies a block out and returns GOOD only when length, key and checksum all match.
  2. All blocks of a weights version share a prefix of their name that no other weights version's do.
"""

from __future__ import annotations

import enum
import struct

import numpy as np
from numpy.typing import NDArray

from seer.kvpool import _arena
from seer.kvpool.keys import KeyArray

_FOOTER = struct.Struct("<8sQQ32s")  # magic, length, checksum, key
_MAGIC = b"seerkv01"  # changes with the footer's form
FOOTER_BYTES = _FOOTER.size


class Unsealed(enum.Enum):
    """What came of a record that was read."""

    GOOD = enum.auto()
    MISS = enum.auto()
    """Nothing was read, or a block of another size."""
    CORRUPT = enum.auto()


def names(keys: KeyArray) -> list[str]:
    """Mooncake's names of blocks: the weights version first, so that a purge is one pattern."""
    return [f"{weights_version_of(k):016x}/{bytes(k[8:]).hex()}" for k in keys]


def weights_version_pattern(weights_version: int) -> str:
    """The regular expression that matches every block of a weights version."""
    return f"^{weights_version:016x}/"


def drop_mark(weights_version: int) -> str:
    """The name under which it is noted that a weights version was dropped."""
    return f"dropped/{weights_version:016x}"


def weights_version_of(key: NDArray[np.uint8]) -> int:
    """The weights version in a key."""
    return int.from_bytes(bytes(key[:8]), "little")


def seal(row: NDArray[np.uint8], block: NDArray[np.uint8], key: bytes) -> int:
    """Copy a block into a row and sign it; returns the size of the record."""
    size = block.nbytes
    check = _arena.copy_checksum(row[:size], block)
    _FOOTER.pack_into(row.data, size, _MAGIC, size, check, key)
    return size + FOOTER_BYTES


def unseal(row: NDArray[np.uint8], num_read: int, block: NDArray[np.uint8], key: bytes) -> Unsealed:
    """Copy a block out of a row if it is the one asked for; `num_read` is what Mooncake answered."""
    if num_read != block.nbytes + FOOTER_BYTES:
        return Unsealed.MISS
    magic, length, check, stored_key = _FOOTER.unpack_from(row.data, block.nbytes)
    good = magic == _MAGIC and length == block.nbytes and stored_key == key
    if good and _arena.copy_checksum(block, row[: block.nbytes]) == check:
        return Unsealed.GOOD
    return Unsealed.CORRUPT
