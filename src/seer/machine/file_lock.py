# SPDX-License-Identifier: Apache-2.0
"""A lock on a file, which shows that its holder lives.

The kernel releases the lock when the holder ends, however it ends, so a file that a killed process left blocks nothing.
It works between containers too, which see other process ids but the same file.

Invariants
  1. At most one holder has the lock of a path.
  2. The lock is on the file that the path names now: a file that its last holder removed counts for nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from seer.machine.private_files import open_own

_LOOK_S = 0.02  # between two tries: the kernel has no deadline for a lock


def _open_private(path: Path) -> int:
    return open_own(path, os.O_RDWR | os.O_CREAT)


class FileLock:
    """A lock, held until `release` or the end of the process and of those that inherited its descriptor."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def acquire(
        cls, path: Path, deadline_s: float = 0.0, *, open_file: Callable[[Path], int] = _open_private
    ) -> FileLock | None:
        """Take the lock, making its file if there is none; None if another holder keeps it until the deadline.

        `open_file` opens it for writing, and refuses what must not be locked: the default, all but private files.
        """
        deadline = time.monotonic() + deadline_s
        while True:
            descriptor = open_file(path)
            is_locked = False
            try:
                is_locked = _set_lock(descriptor)
                if is_locked and _is_named(descriptor, path):
                    kept, descriptor = descriptor, -1
                    return cls(path, kept)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
            # A lock on a file that its last holder removed is not the one that others will see: try again.
            if not is_locked:
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_LOOK_S)

    def release(self, *, remove_file: bool = True) -> None:
        """Give the lock back; a second call does nothing."""
        if self.descriptor < 0:
            return
        # Removed while it is locked: a process that opened it before sees that it has no name any more.
        try:
            if remove_file and _is_named(self.descriptor, self.path):
                self.path.unlink(missing_ok=True)
        finally:
            os.close(self.descriptor)
            self.descriptor = -1


def is_held(path: Path) -> bool:
    """Whether any process, this one too, holds the lock of this file."""
    try:
        descriptor = open_own(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _lock_request(fcntl.F_WRLCK))
        kind: int = struct.unpack_from("h", answer)[0]
        return kind != fcntl.F_UNLCK
    finally:
        os.close(descriptor)


def holds(pid: int, path: Path) -> bool:
    """Whether this very process holds the lock of this file, by what the kernel lists for its descriptors."""
    try:
        ours = os.lstat(path)
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed since
                is_lock_file = os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), ours)
                if is_lock_file and "OFDLCK" in Path(f"/proc/{pid}/fdinfo/{number}").read_text():
                    return True
    except OSError:
        pass  # no such process that this user can see
    return False


def _set_lock(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock_request(fcntl.F_WRLCK))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _lock_request(kind: int) -> bytes:
    """A `struct flock` for the whole file; the kernel wants a process id of 0 in it."""
    return struct.pack("hhlli4x", kind, os.SEEK_SET, 0, 0, 0)


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
