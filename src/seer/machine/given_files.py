# SPDX-License-Identifier: Apache-2.0
"""Files that users name, or that lie in folders which others made: one way to open all of them.

Links are followed, as users expect of their own paths and of the Hub's cache. What a path leads to may be anything.

Invariants
  1. Only regular files are read, and pipes where the caller allows them: `<(...)` and /dev/stdin. Opening never waits,
     as it would for a FIFO, and no device is opened.
  2. No more is read than the caller's limit, and a file that states more is refused before it is read.
  3. A pipe gives its bytes once; a second reader gets the same.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from seer.errors import InputError
from seer.machine.sizes import show_size

SETTINGS_BYTES = 16 << 20
"""Most bytes of configurations, templates and profiles: people write kilobytes."""
MODEL_JSON_BYTES = 1 << 30
"""Most bytes of one JSON file of a model folder, tokenizers and indices of weights included."""
RECORD_BYTES = 64 << 30
"""Most bytes of prompts, results and journals, which are held in memory."""
PIPE_BYTES = 1 << 30
"""Most bytes that are read from a pipe, which does not say how many it has."""
_PART_BYTES = 1 << 16

_drained: dict[tuple[int, int], bytes] = {}
"""What pipes gave, by device and inode."""


def open_given(path: Path, *, limit_bytes: int | None = None, may_be_pipe: bool = False) -> BufferedReader:
    """Open a file for reading. An OSError says why it cannot be opened; anything but a file is an InputError."""
    _check(path, os.stat(path), limit_bytes, may_be_pipe)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(descriptor), limit_bytes, may_be_pipe)
        os.set_blocking(descriptor, True)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_given(path: Path, *, limit_bytes: int, may_be_pipe: bool = False) -> bytes:
    """The content of a file, as `open_given` opens it."""
    with open_given(path, limit_bytes=limit_bytes, may_be_pipe=may_be_pipe) as file:
        status = os.fstat(file.fileno())
        key = (status.st_dev, status.st_ino)
        is_pipe = stat.S_ISFIFO(status.st_mode)
        if is_pipe and key in _drained:
            return _drained[key]
        limit_bytes = min(limit_bytes, PIPE_BYTES) if is_pipe else limit_bytes
        content = _read_to(file, limit_bytes + 1, status.st_size)
        if len(content) > limit_bytes:
            raise InputError(f"{path} gives more than {show_size(limit_bytes)}, the limit")
        if is_pipe:
            _drained[key] = content
    return content


def _read_to(file: BufferedReader, limit_bytes: int, expected_bytes: int) -> bytes:
    """Up to `limit_bytes`. Python takes memory for all that a read may give, so not much more is asked for."""
    parts = []
    while limit_bytes and (part := file.read(min(limit_bytes, expected_bytes + _PART_BYTES))):
        parts.append(part)
        limit_bytes -= len(part)
    return b"".join(parts)


def check_given(path: Path, *, limit_bytes: int | None = None) -> Path:
    """The same path, for a library that opens it by itself, if `open_given` would open it."""
    _check(path, os.stat(path), limit_bytes, may_be_pipe=False)
    return path


def _check(path: Path, status: os.stat_result, limit_bytes: int | None, may_be_pipe: bool) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode) and not (may_be_pipe and stat.S_ISFIFO(status.st_mode)):
        raise InputError(f"{path} is not a regular file", hint="a pipe or a device cannot be read here: copy it first")
    if limit_bytes is not None and status.st_size > limit_bytes:
        raise InputError(f"{path} has {show_size(status.st_size)}", hint=f"at most {show_size(limit_bytes)}")
