# SPDX-License-Identifier: Apache-2.0
"""Folders that live as long as the process which made them, even if it is killed: the next process removes them.

They lie in this user's private folder (private_files.py). Beside each lies a lock file that its owner holds
(file_lock.py).

Shared memory and semaphores that are named after a folder (owned_segments.py), or after a file in it that has a random
name, are removed with it.

Invariant: a folder is removed only while the lock of its owner is free or this process's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import secrets
import shutil
import stat
from pathlib import Path

from seer.errors import InputError
from seer.machine.file_lock import FileLock
from seer.machine.private_files import SHARED_MEMORY, folder, make_private, remove

log = logging.getLogger(__name__)

_FOLDER = re.compile(r"[a-z][a-z-]*-[0-9a-f]{16}")
"""Names that `make_folder` gives: their kind, then a part of 64 bits."""
_RANDOM_NAME = re.compile(r"[a-z_]+_[0-9a-f]{32}")
"""Of a file after which a library names shared memory; shorter names could be those of other programs."""
_LOCK_SUFFIX = ".folder.lock"
_held: dict[Path, FileLock] = {}  # locks of the folders that this process made


def make_folder(kind: str, base: Path | str, *, named_after: bytes | None = None) -> Path:
    """A new folder for this process; the next process that calls this removes it if this one is killed.

    Its name is random; with `named_after`, the first of a row made from these bytes that no process has. A process that
    is started again finds its old name free then, for caches whose keys have paths in them.
    """
    home = folder(base)
    remove_orphans(home)
    numbers = itertools.count()
    while True:
        own = secrets.token_bytes(8) if named_after is None else _nth_name(named_after, next(numbers))
        path = home / f"{kind}-{own.hex()}"
        assert _FOLDER.fullmatch(path.name), f"{kind!r} is not made of small letters and dashes"
        # Locked before it exists, so that no other process takes it for an orphan.
        lock = FileLock.acquire(_lock_of(path))
        if lock is not None:
            break
    _held[path] = lock
    _remove_with_segments(path)  # a process that had this name may have been killed since the orphans were removed
    make_private(path)
    return path


def _nth_name(named_after: bytes, number: int) -> bytes:
    return hashlib.blake2b(named_after, digest_size=8, salt=number.to_bytes(8, "little")).digest()


def lock_descriptor(path: Path) -> int:
    """The descriptor that keeps a folder of this process; a child that inherits it keeps the folder too."""
    return _held[path].descriptor


def disown(path: Path) -> None:
    """Give up a folder without removing it: it lives as long as a child that inherited its descriptor."""
    lock = _held.pop(path, None)
    if lock is not None:
        lock.release(remove_file=False)


def _remove_with_segments(path: Path) -> None:
    """Remove a folder, and the shared memory and semaphores that are named after it or after files in it."""
    owner = path.name.rpartition("-")[2]
    files: list[str] = []
    with contextlib.suppress(OSError):  # there is none, or somebody else removes it now
        files = [f"{name}-" for name in os.listdir(path) if _RANDOM_NAME.fullmatch(name)]
    prefixes = (f"psm_{owner}_", f"sem.mp-{owner}-", *files)  # not patterns: Python keeps the last 512 of those
    shutil.rmtree(path, ignore_errors=True)
    for segment in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ():
        if not segment.name.startswith(prefixes):
            continue
        with contextlib.suppress(OSError):
            status = segment.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                segment.unlink()


def remove_folder(path: Path) -> None:
    """Remove a folder that `make_folder` made, here or in the process that left it to this one."""
    if _FOLDER.fullmatch(path.name):
        _remove_with_segments(path)
    else:
        shutil.rmtree(path, ignore_errors=True)
    lock = _held.pop(path, None)
    if lock is not None:
        lock.release()
    elif _FOLDER.fullmatch(path.name):
        remove(_lock_of(path))


def remove_orphans(home: Path) -> list[Path]:
    """Remove the folders whose owner is gone; returns them."""
    gone = []
    for name in sorted(os.listdir(home)):
        path = home / name.removesuffix(_LOCK_SUFFIX)
        if not (name.endswith(_LOCK_SUFFIX) and _FOLDER.fullmatch(path.name)):
            continue
        try:
            lock = FileLock.acquire(_lock_of(path))
        except (OSError, InputError) as error:
            log.warning("%s is left: %s", path, error)
            continue
        if lock is None:
            continue
        if path.is_dir() and not path.is_symlink():
            log.warning("removing %s: its process is gone", path)
            _remove_with_segments(path)
            gone.append(path)
        lock.release()
    return gone


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + _LOCK_SUFFIX)
