# SPDX-License-Identifier: Apache-2.0
"""The console that tables are printed on."""

from __future__ import annotations

import sys

from rich.console import Console


def wide_console(columns: int, *, soft_wrap: bool = False) -> Console:
    """The terminal; into a file or a pipe, which have no width, so many columns, so that a table keeps its own."""
    return Console(soft_wrap=soft_wrap, width=None if sys.stdout.isatty() else columns)
