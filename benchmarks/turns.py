# SPDX-License-Identifier: Apache-2.0
"""Turns on one machine: engines take a minute to start, so they start together and are measured one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def await_turn(go: Path | None, limit_s: float, *, goes_on: Callable[[], bool] = lambda: True) -> None:
    """Return once the file `go` exists, at once if `go` is None, or when `goes_on` says that nobody waits."""
    deadline_s = time.monotonic() + limit_s
    while go is not None and not go.exists() and goes_on():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{go} did not appear within {limit_s:.0f} s")
        time.sleep(0.1)


def end_turn(go: Path | None) -> None:
    """Say that the measurement is over: the file goes."""
    if go is not None:
        go.unlink(missing_ok=True)
