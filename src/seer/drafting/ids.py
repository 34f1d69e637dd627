# SPDX-License-Identifier: Apache-2.0
"""Names of groups and requests as 64-bit numbers, the same in every process.

Callers may name things with strings or with integers. The index and the wire use unsigned 64-bit integers;
a string becomes the first eight bytes of its BLAKE2b digest, so two instances agree without talking. With
100,000 names the chance that any two collide is below one in a billion, and a collision costs draft
quality, never correctness.
"""

from functools import lru_cache
from hashlib import blake2b

Name = int | str
"""What callers may call a group or a request."""

_MASK = (1 << 64) - 1

MAX_KEPT = 4096
"""Names whose numbers are kept: those of the requests and groups that run on an instance. Names carry their run, so
what is kept beyond that is never asked for again."""


@lru_cache(maxsize=MAX_KEPT)
def number_of(name: Name) -> int:
    """Return the 64-bit number of a name; an integer within range is its own number."""
    if isinstance(name, int):
        if not 0 <= name <= _MASK:
            raise ValueError(f"id {name} does not fit 64 unsigned bits")
        return name
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def mix(*parts: int) -> int:
    """Return one 64-bit number for several, in order."""
    packed = b"".join(part.to_bytes(8, "little") for part in parts)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")
