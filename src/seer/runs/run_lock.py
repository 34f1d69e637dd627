# SPDX-License-Identifier: Apache-2.0
"""Locks that keep two drivers out of one run: `run.lock` in a run's folder, `NAME.lock` beside a journal, a partial
results file.

Each is a `FileLock` on a file in a folder that need not be private. A lock file holds its driver's process id for the
error message of a second driver; nothing else reads it.

Invariants
  1. A second driver is refused at once.
  2. No link is followed, and nothing but a plain file of one name is written to.
  3. A child of the holder does not keep the lock.
"""

from __future__ import annotations

import contextlib
import os
import stat
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from seer.errors import InputError
from seer.machine.file_lock import FileLock

_held: set[FileLock] = set()
"""Locks of this process. A forked child closes its copies; else it would hold the locks after its parent."""


class RunLock:
    """A lock that is held from its making until `release`."""

    def __init__(self, path: Path, *, what: Path) -> None:
        """Lock `path`; `what` is the folder or file that errors name."""
        self._lock = lock_file(path, what=what, mode=0o600)
        os.ftruncate(self._lock.descriptor, 0)
        os.pwrite(self._lock.descriptor, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Remove the file and give the lock up; a second call does nothing."""
        unlock_file(self._lock, remove_file=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lock_file(path: Path, *, what: Path, mode: int) -> FileLock:
    """Open a file for writing, made if need be, and lock it; its content stays. Ended by `unlock_file`."""
    try:
        lock = FileLock.acquire(path, open_file=partial(_open_plain, mode=mode))
    except OSError as error:
        raise InputError(
            f"{what} cannot be locked: {path.name}: {error.strerror}",
            hint=f"can you write to {path.parent}, and has its file system locks?",
        ) from None
    if lock is None:
        raise InputError(f"{what} is in use by another run", hint=_holder(path))
    _held.add(lock)
    return lock


def unlock_file(lock: FileLock, *, remove_file: bool = False) -> None:
    """Give a lock of `lock_file` up; a second call does nothing."""
    _held.discard(lock)
    with contextlib.suppress(OSError):  # the folder may be gone or read-only by now
        lock.release(remove_file=remove_file)


def _open_plain(path: Path, mode: int) -> int:
    """Open a plain file of one name, made if need be; never waits, as a FIFO would make it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return file
    os.close(file)
    what = "has a second name" if stat.S_ISREG(status.st_mode) else "is not a plain file"
    raise InputError(f"{path} cannot be locked: it {what}", hint=f"remove {path}")


def _holder(path: Path) -> str:
    """Who holds the lock, as far as the file says: a process of another machine or container may be meant."""
    pid = "another process"
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        pid = f"process {int(file.read(32))}"
    return f"{pid} holds it; wait until that run has ended, or choose another folder"


def _forget_in_child() -> None:
    for lock in list(_held):
        unlock_file(lock)


os.register_at_fork(after_in_child=_forget_in_child)
