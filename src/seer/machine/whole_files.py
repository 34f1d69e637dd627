# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or absent: written beside their place as NAME.partial, then moved there.

Invariants
  1. A reader of the place sees the old content or the new one, never a part of either.
  2. No link is followed: one at the place, or at NAME.partial, is replaced, and what it names stays as it is.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or leave the one that is there and raise the OSError."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with create_anew(partial) as file:
            file.write(content)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def create_anew(path: Path) -> BinaryIO:
    """An empty file at a place; what was there loses its name and keeps its content."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")
