# SPDX-License-Identifier: Apache-2.0
"""Interpreters that `multiprocessing` starts do not look for modules in the current folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_VARIABLE = "PYTHONSAFEPATH"


@contextlib.contextmanager
def without_current_folder() -> Iterator[None]:
    """Around the start of a process by spawning: it and the tracker that it may need run `python -c`, which would."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
