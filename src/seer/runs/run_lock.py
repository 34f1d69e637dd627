# SPDX-License-Identifier: Apache-2.0
"""Locks that keep two drivers out of one run: `run.lock` in a run's folder, and `NAME.lock` beside a journal.

A lock is an flock on the file, held for as long as its driver writes. The kernel releases it when the driver dies,
however that happens, so a file that a killed driver left blocks nothing. The file holds the driver's process id for
the error message of a second driver; nothing else reads it.

Invariants
  1. At most one process holds the lock of a path. A second one is refused at once.
  2. The lock is on the file that the path names now: a file that its last holder removed counts for nothing.
  3. No link is followed, and nothing but a plain file of one name is written to.
  4. A child of the holder does not keep the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from seer.errors import InputError

_held: set[int] = set()
"""Descriptors of this process. A forked child closes its copies; else it would hold the locks after its parent."""


class RunLock:
    """A lock that is held from its making until `release`."""

    def __init__(self, path: Path, *, what: Path) -> None:
        """Lock `path`; `what` is the folder or file that errors name."""
        self.path = path
        self._file = lock_file(path, what=what, mode=0o600)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Remove the file and give the lock up; a second call does nothing."""
        if self._file < 0:
            return
        # Removed while it is locked: a process that opened it before sees that it has no name any more.
        with contextlib.suppress(OSError):
            if _is_named(self._file, self.path):
                self.path.unlink()
        unlock_file(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lock_file(path: Path, *, what: Path, mode: int) -> int:
    """Open a file for writing, made if need be, and lock it; its content stays. Ended by `unlock_file`."""
    while True:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            file = os.open(path, flags, mode)
        except OSError as error:
            raise InputError(
                f"{what} cannot be written: {path.name}: {error.strerror}", hint=f"can you write to {path.parent}?"
            ) from None
        try:
            if _try_lock(file, path, what):
                _held.add(file)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def unlock_file(file: int) -> None:
    """Close a file of `lock_file`, which gives its lock up."""
    _held.discard(file)
    os.close(file)


def _try_lock(file: int, path: Path, what: Path) -> bool:
    """Lock an open file; False if it lost its name before it was locked."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise InputError(f"{what} cannot be locked: {path.name} is not a plain file", hint=f"remove {path}")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{what} is in use by another run", hint=_holder(file)) from None
    except OSError as error:
        raise InputError(
            f"{what} cannot be locked: {error.strerror}", hint="choose a folder on a file system with locks"
        ) from None
    if not _is_named(file, path):
        return False
    if os.fstat(file).st_nlink > 1:
        raise InputError(f"{what} cannot be locked: {path.name} has a second name", hint=f"remove {path}")
    return True


def _holder(file: int) -> str:
    """Who holds the lock, as far as the file says: a process of another machine or container may be meant."""
    text = os.pread(file, 32, 0).strip()
    pid = f"process {int(text)}" if text.isdigit() else "another process"
    return f"{pid} holds it; wait until that run has ended, or choose another folder"


def _is_named(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _forget_in_child() -> None:
    for file in _held:
        with contextlib.suppress(OSError):
            os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
