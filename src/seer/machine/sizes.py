# SPDX-License-Identifier: Apache-2.0
"""Memory sizes as people write and read them: 4096, 512MiB, 1.5GiB, 512MB."""

import re

from seer.errors import ConfigError

_BINARY = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_FACTORS = (
    {"": 1, "b": 1}
    | {unit.lower(): factor for unit, factor in _BINARY.items()}
    | {unit[0].lower(): factor for unit, factor in _BINARY.items()}
    | {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
)


MAX_BYTES = 1 << 50
"""Larger sizes are slips of the pen; 1 PiB."""


def parse_size(text: str) -> int:
    """Return bytes. GiB and G are powers of 1024, GB of 1000; upper or lower case; no unit means bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    factor = _FACTORS.get(match[2]) if match is not None else None
    if match is None or factor is None:
        raise ConfigError(f"{text[:40]!r} is not a size", hint="write it like 512MiB, 1.5GiB or 4096")
    size = float(match[1]) * factor
    if size > MAX_BYTES:
        raise ConfigError(f"{text[:40]!r} is beyond every machine", hint=f"at most {show_size(MAX_BYTES)}")
    return int(size)


def show_size(num_bytes: float) -> str:
    """Return a size in the largest unit that leaves a number of at least 1."""
    for unit, factor in _BINARY.items():
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"
