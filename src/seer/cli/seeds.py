# SPDX-License-Identifier: Apache-2.0
"""The value of `--seeds`: numbers separated by commas, and ranges that include both ends (`0..7`)."""

from __future__ import annotations

from seer.errors import ConfigError


def parse_seeds(text: str) -> list[int]:
    """The seeds in the order given, each once."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            start, end = int(first), int(last if dots else first)
        except ValueError:
            raise ConfigError(
                f"--seeds {text!r} is not a list of numbers", hint="--seeds 0,1,2 or --seeds 0..7"
            ) from None
        if start < 0 or end < start:
            raise ConfigError(f"--seeds {part}", hint="seeds are 0 or more, and a range goes upwards: --seeds 0..7")
        seeds.extend(range(start, end + 1))
    return list(dict.fromkeys(seeds))
