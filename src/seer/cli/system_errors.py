# SPDX-License-Identifier: Apache-2.0
"""Errors of the operating system that are no bugs of Seer: a full disk, a read-only folder, a path that is not there.

What a user can put right by other arguments has exit code 2, what the machine lacks has 1. Any other OSError is a bug.
"""

from __future__ import annotations

import errno
from typing import NamedTuple

EXIT_MACHINE, EXIT_PATH = 1, 2

_PATHS = {
    errno.ENOENT: "is the path right?",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "name a file",
    errno.EEXIST: "name another path, or remove what is there",
    errno.EACCES: "use a path that this user may read and write",
    errno.EPERM: "use a path that this user may read and write",
    errno.EROFS: "the file system is read-only; use another folder",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ELOOP: "the path has a loop of links",
    errno.ENXIO: "name a regular file",
    errno.EINVAL: "name a regular file",
}
_MACHINE = {
    errno.ENOSPC: "the disk is full: free some space; `seer doctor --clean` removes what killed runs left",
    errno.EDQUOT: "this user's quota is used up: free some space",
    errno.EFBIG: "the file is larger than this process may write (ulimit -f)",
    errno.EIO: "the disk or the terminal failed",
    errno.ENODEV: "the device is gone",
    errno.ESTALE: "the network file system lost the file",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the machine has no more open files to give",
    errno.ENOMEM: "the machine has no more memory to give",
    errno.EAGAIN: "the machine has no more processes to give (ulimit -u)",
    errno.ETIMEDOUT: "the network or its file system does not answer",
}


class Explanation(NamedTuple):
    """What is printed, and the exit code."""

    message: str
    hint: str
    exit_code: int


def explain(error: BaseException) -> Explanation | None:
    """An error of the system in one line; None if it is a bug."""
    if isinstance(error, MemoryError):
        return Explanation("out of memory", _MACHINE[errno.ENOMEM], EXIT_MACHINE)
    if not isinstance(error, OSError) or error.errno is None:
        return None
    where = f"{error.filename}: " if error.filename is not None else ""
    message = f"{where}{error.strerror}"
    if error.errno in _MACHINE:
        return Explanation(message, _MACHINE[error.errno], EXIT_MACHINE)
    if error.errno in _PATHS and error.filename is not None:
        return Explanation(message, _PATHS[error.errno], EXIT_PATH)
    return None
