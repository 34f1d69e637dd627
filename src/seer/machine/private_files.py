# SPDX-License-Identifier: Apache-2.0
"""Files for this user's processes alone: in shared memory, or wherever a base folder is named.

All of them lie in one folder per user and base, `<base>/seer-<uid>`, mode 0700. Every user may be able to write to the
base, as to /dev/shm, and so take this name first; then the folder is `<base>/seer-<uid>-<random>`, found again by its
owner.

Invariants
  1. The folder is a directory of this user that gives no access to others, and no link. Otherwise it is refused, or,
     where it belongs to another user, left alone.
  2. A file is used only if it is regular, no link, of this user, and gives no access to others. Opening never waits (a
     FIFO would make it wait), and what is read has a limit.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

from seer.errors import ConfigError, InputError

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux mounts shared memory."""
MAX_BYTES = 1 << 20
"""Limit of a file that is read whole, unless the caller names another: notes and states have a few hundred bytes."""
_OTHERS = 0o077
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def folder(base: Path | str) -> Path:
    """This user's folder below `base`, made if there is none."""
    found = find_folder(base)
    if found is not None:
        return found
    base = Path(base)
    try:
        status = base.stat()
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise ConfigError(
                f"{base} is writable for every user and lacks the sticky bit: others could replace what is in it",
                hint=f"chmod +t {base}, or name another folder",
            )
        plain = base / f"seer-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):  # made by another process just now, or taken by another user
            make_private(plain)
        found = find_folder(base)
        if found is None:
            log.warning("%s belongs to another user: a folder of another name is used", plain)
            make_private(base / f"{plain.name}-{secrets.token_hex(8)}")
            found = find_folder(base)
    except OSError as error:
        raise ConfigError(f"cannot make a folder in {base}: {error.strerror}", hint="name another folder") from None
    assert found is not None, f"the folder made in {base} is gone"
    return found


def find_folder(base: Path | str) -> Path | None:
    """This user's folder below `base`, checked; None if there is none."""
    plain = f"seer-{os.geteuid()}"
    if _is_mine(Path(base) / plain):
        return check_folder(Path(base) / plain)
    try:
        names = [name for name in os.listdir(base) if re.fullmatch(rf"{plain}-[0-9a-f]{{16}}", name)]
    except OSError:
        return None
    mine = [Path(base) / name for name in sorted(names) if _is_mine(Path(base) / name)]
    return check_folder(mine[0]) if mine else None


def check_folder(path: Path) -> Path:
    """The same path, if it is a directory that only this user can open."""
    try:
        status = os.lstat(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is not a directory", hint="remove it: Seer keeps its files in a directory there")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to user {status.st_uid}, not to this user ({os.geteuid()})")
    if status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"{path} has mode {mode:04o}: other users can open it", hint=f"chmod 700 {path}")
    return path


def is_inside(path: Path) -> bool:
    """Whether a path lies in this user's folder in shared memory or among the temporary files."""
    here = Path(os.path.abspath(path)).parents
    bases = {SHARED_MEMORY, Path(tempfile.gettempdir())}
    return any(home in here for base in bases if (home := find_folder(base)) is not None)


# Files


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file of this user's alone; refuses anything else, and never waits."""
    try:
        descriptor = os.open(path, flags | _FLAGS, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # a link; a FIFO or a socket; a folder
            raise InputError(f"{path} is not a regular file", hint="remove it") from None
        raise
    try:
        _check_own(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_file(path: Path) -> Path:
    """The same path, if it is a regular file that only this user can open."""
    _check_own(os.lstat(path), path)
    return path


def read(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a file of this user's alone."""
    with open(open_own(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InputError(f"{path} has more than {max_bytes} bytes, the limit")
    return content


def write(path: Path, content: bytes) -> None:
    """Replace a file; readers see the old or the new content. One process at a time may write a file."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed while writing
    with open(create(temporary), "wb") as file:
        file.write(content)
    temporary.rename(path)


def create(path: Path) -> int:
    """A descriptor of a new file of mode 0600, open for reading and writing; there must be none."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    os.fchmod(descriptor, 0o600)  # whatever the umask is
    return descriptor


def remove(path: Path) -> bool:
    """Remove a regular file of this user's; anything else stays. False when it stays or there is none."""
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            log.warning("%s is left: it is not a regular file of this user", path)
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _check_own(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is not a regular file", hint="remove it")
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
        raise InputError(
            f"{path} is not a file that only this user can read and write "
            f"(owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o})",
            hint="Seer makes its files with mode 0600; remove this one",
        )


def _is_mine(path: Path) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def make_private(path: Path) -> None:
    """Make a folder of mode 0700."""
    path.mkdir(mode=0o700)
    path.chmod(0o700)  # whatever the umask is
