# SPDX-License-Identifier: Apache-2.0
"""Numbers on the command line: each has a kind of `seer.ranges`, and what is outside of it is a usage error."""

from __future__ import annotations

import argparse
from typing import Any

from seer.errors import ConfigError
from seer.ranges import base_type, check, describe


class NumberOption:
    """For `add_argument(type=...)`: reads one number of this kind."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __call__(self, text: str) -> Any:
        """The number, refused the way argparse reports bad values."""
        try:
            value = base_type(self.kind)(text)
            check(value, self.kind, "got")
        except (ValueError, ConfigError):
            shown = text if len(text) <= 60 else f"{text[:57]}..."
            raise argparse.ArgumentTypeError(f"{shown!r} is not {self._words()}") from None
        return value

    def _words(self) -> str:
        return f"{'a whole number' if base_type(self.kind) is int else 'a number'}, {describe(self.kind)}"


def number_list(text: str, kind: Any, option: str) -> list[int]:
    """`1,8,32` as numbers of this kind, in their order."""
    read = NumberOption(kind)
    try:
        return [read(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{option} {text[:60]!r}: {error}", hint=f"a list like {option} 1,8,32") from None
