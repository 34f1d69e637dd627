# SPDX-License-Identifier: Apache-2.0
"""The value of `--seeds`: numbers separated by commas, and ranges that include both ends (`0..7`)."""

from __future__ import annotations

from seer.errors import ConfigError
from seer.ranges import Seed, check

MAX_SEEDS = 10_000
"""Each is a set of lengths that is simulated, and stays in memory until the end."""


def parse_seeds(text: str) -> list[int]:
    """The seeds in the order given, each once."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            start, end = int(first), int(last if dots else first)
        except ValueError:
            raise ConfigError(
                f"--seeds {text[:60]!r} is not a list of numbers", hint="--seeds 0,1,2 or --seeds 0..7"
            ) from None
        if start < 0 or end < start:
            raise ConfigError(f"--seeds {part}", hint="seeds are 0 or more, and a range goes upwards: --seeds 0..7")
        check(end, Seed, "--seeds")
        if len(seeds) + end - start >= MAX_SEEDS:
            raise ConfigError(f"--seeds {part} are too many", hint=f"at most {MAX_SEEDS:,} seeds in all")
        seeds.extend(range(start, end + 1))
    return list(dict.fromkeys(seeds))
