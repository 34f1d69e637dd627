# SPDX-License-Identifier: Apache-2.0
"""Lists of GPUs on the command line."""

import argparse

from seer.errors import ConfigError
from seer.machine.gpus import parse_gpus


def gpus_option(text: str) -> tuple[int, ...]:
    """For `add_argument(type=...)`: the GPUs of `0,1,4-7`, refused the way argparse reports bad values."""
    try:
        return parse_gpus(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error}; {error.hint}") from None
