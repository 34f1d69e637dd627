# SPDX-License-Identifier: Apache-2.0
"""Sizes on the command line."""

import argparse

from seer.errors import ConfigError
from seer.machine.sizes import parse_size


def size_option(text: str) -> int:
    """For `add_argument(type=...)`: bytes of a size, refused the way argparse reports bad values."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error}; {error.hint}") from None
