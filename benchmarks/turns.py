"""Engines take a minute to start, so several start side by side and are measured one after the other."""

from __future__ import annotations

import time
from pathlib import Path


def await_turn(go: Path | None, limit_s: float) -> None:
    """Return once the file `go` is there; at once where none is named."""
    deadline_s = time.monotonic() + limit_s
    while go is not None and not go.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{go} did not appear within {limit_s:.0f} s")
        time.sleep(0.1)
