# SPDX-License-Identifier: Apache-2.0
"""Where the local pool keeps its files, and whether it may use them.

In this user's folder below `dram_dir` (seer.machine.private_files): `pool-<name>.arena` (shared memory), `.json` (a
note with the path of the SSD file) and `.state` (of `seer pool up`). In this user's folder below `ssd_dir`:
`pool-<name>.slab`, the SSD tier. Two locks: `.lock` lets one process at a time create or remove; `.owner` is held for
its life by the process that the pool was made for, if there is one: the driver of a rollout, or that of `seer pool
up`.

Invariants
  1. Every file is readable and writable by its owner alone; one that is not is refused, never adopted.
  2. A pool is alive while its owner lock is held or a process has its arena open (which holds a lock on a byte of it).
     Process ids are only shown: they mean nothing in another container.
  3. An arena is taken over only from the same run. One of another run is refused while it is alive, and removed
     otherwise: that is what a dead run leaves behind. Creating a pool also removes the dead ones of other names, once
     they are a minute old.
  4. Nothing outside this user's folders is removed, whatever a note says.
  5. What cannot work is refused before anything is written, in one line: a missing or read-only folder, a
     full disk, an arena larger than memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from seer.errors import ConfigError, PoolError, SeerError
from seer.kvpool import _arena
from seer.machine import file_lock, private_files
from seer.machine.json_files import UNREADABLE
from seer.ranges import NAME_PATTERN

log = logging.getLogger(__name__)

_MIN_SLOTS = 4  # a smaller DRAM tier is a mistake in a size
_MAX_SLOTS = 2**24 - 2  # a slot number has 24 bits (csrc/kvpool/layout.h)
_LOCK_DEADLINE_S = 30.0  # another process may be creating a large arena
_STALE_AFTER_S = 60.0  # an arena this young may be between its creation and its first user
_NAME = re.compile(NAME_PATTERN)
_FILE = re.compile(r"pool-(?P<name>.*)\.(arena|arena\.tmp|json|json\.tmp|state|state\.tmp|lock|owner)", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalPoolConfig:
    """Sizes and places of a local pool."""

    block_bytes: int
    """Largest block; a slot has this size, rounded up to pages."""

    dram_bytes: int
    """Size of the DRAM tier."""

    ssd_bytes: int = 0
    """Size of the SSD tier; 0 for none."""

    ssd_dir: str = ""
    """Folder of the SSD tier; must exist. The file lies below it, in a folder for this user alone."""

    name: str = "default"
    """Processes that give the same name share a pool."""

    run: str = ""
    """Which run the pool belongs to; a pool of a dead run is removed, one of a living run is refused. Empty:
    the name."""

    dram_dir: str = "/dev/shm"
    """Folder of the DRAM tier; on tmpfs, else it is none. The arena lies below it, in a folder for this user alone."""

    deadline_s: float = 5.0
    """No call waits longer for the pool's lock or for room."""

    populate: bool = True
    """Map all pages when opening: slower to open, no page faults later."""

    promote: bool = True
    """Copy a block that was read from SSD back to DRAM where a slot is to spare."""

    keeper: bool = True
    """Take part in keeping DRAM slots free in the background."""

    num_threads: int = 2
    """Threads for the asynchronous calls."""

    must_exist: bool = False
    """Only join the pool. The process that it was made for removes it at the end; one that is made after that is left
    behind."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.block_bytes < 1 or self.block_bytes > 1 << 31:
            raise ConfigError(f"pool.block_bytes={self.block_bytes} is outside 1 B..2 GiB")
        if self.dram_bytes < _MIN_SLOTS * self.stride_bytes:
            raise ConfigError(
                f"pool.dram_bytes={self.dram_bytes} is less than {_MIN_SLOTS} blocks of {self.block_bytes}",
                hint=f"give at least {_MIN_SLOTS * self.stride_bytes}",
            )
        if max(self.dram_slots, self.ssd_slots) > _MAX_SLOTS:
            raise ConfigError(
                f"pool: {max(self.dram_slots, self.ssd_slots)} blocks in one tier, limit {_MAX_SLOTS}",
                hint="use larger blocks: more tokens per block",
            )
        if self.ssd_bytes and not self.ssd_dir:
            raise ConfigError("pool.ssd_bytes is set and pool.ssd_dir is not", hint="name a folder on a local SSD")
        if len(self.run.encode()) > 87:
            raise ConfigError(f"pool.run has {len(self.run.encode())} bytes, the limit is 87")

    @property
    def stride_bytes(self) -> int:
        """Bytes of a slot."""
        return -(-self.block_bytes // 4096) * 4096

    @property
    def dram_slots(self) -> int:
        """Blocks the DRAM tier holds."""
        return self.dram_bytes // self.stride_bytes

    @property
    def ssd_slots(self) -> int:
        """Blocks the SSD tier holds."""
        return self.ssd_bytes // self.stride_bytes

    @property
    def num_pins(self) -> int:
        """Pins the pool can hold: prompt blocks are pinned once per request of their group."""
        return max(1024, 4 * (self.dram_slots + self.ssd_slots))


class Note(msgspec.Struct, frozen=True):
    """The content of the `.json` beside an arena."""

    run: str
    slab: str
    """Path of the SSD file; empty when there is no SSD tier."""
    created_unix_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class PoolFiles:
    """Paths of one pool's files."""

    name: str
    folder: Path

    @classmethod
    def named(cls, name: str, dram_dir: str) -> PoolFiles:
        """The paths that belong to a name; makes this user's folder if there is none."""
        check_name(name)
        _check_folder(Path(dram_dir), "pool.dram_dir")
        return cls(name, private_files.folder(dram_dir))

    @classmethod
    def find(cls, name: str, dram_dir: str) -> PoolFiles | None:
        """The same; None where this user has no folder."""
        check_name(name)
        folder = private_files.find_folder(dram_dir)
        return cls(name, folder) if folder is not None else None

    @property
    def arena(self) -> Path:
        """The shared memory."""
        return self._path("arena")

    @property
    def note(self) -> Path:
        """What is known of the pool beside the arena."""
        return self._path("json")

    @property
    def lock(self) -> Path:
        """Held while files are made or removed."""
        return self._path("lock")

    @property
    def owner(self) -> Path:
        """Held by the process that the pool was made for."""
        return self._path("owner")

    @property
    def state(self) -> Path:
        """The state of a pool that `seer pool up` started."""
        return self._path("state")

    def slab(self) -> str:
        """Path of the SSD file, from the note; empty when there is none, or it is not one that this pool would make."""
        try:
            note = msgspec.json.decode(private_files.read(self.note), type=Note)
            slab = Path(note.slab)
            is_ours = slab.name == self._path("slab").name
            return note.slab if is_ours and private_files.find_folder(slab.parent.parent) == slab.parent else ""
        except (OSError, ValueError, *UNREADABLE, SeerError):  # ValueError: a NUL in the path
            return ""

    def _path(self, suffix: str) -> Path:
        return self.folder / f"pool-{self.name}.{suffix}"


class FoundPool(msgspec.Struct, frozen=True):
    """One arena found in a folder."""

    name: str
    arena: str
    slab: str
    run: str
    file_bytes: int
    live_pids: list[int]
    """Processes that have it open, each by its id in its own container."""
    has_owner: bool = False
    """Whether the process that the pool was made for lives."""
    problem: str = ""
    """Why the arena cannot be used, if it cannot."""

    @property
    def stale(self) -> bool:
        """No process uses it."""
        return not self.live_pids and not self.has_owner


def check_name(name: str) -> None:
    """Refuse a name that is no plain file name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"pool name {name!r} is not made of 1 to 64 letters, digits, '.', '_' or '-'")


def open_files(config: LocalPoolConfig) -> tuple[PoolFiles, bool]:
    """Make or find the files of a pool; True when they were made now."""
    files = PoolFiles.named(config.name, config.dram_dir)
    run = config.run or config.name
    with _locked(files) as lock:
        if os.path.lexists(files.arena):
            try:
                found = _arena.probe(str(files.arena))
            except PoolError:
                found = None  # damaged, or from another version: no process can be attached to it
            if found is not None and found["run"] == run and _same_sizes(found, config):
                if found["boot"] == _boot_id():
                    return files, False
            elif found is not None and found["live_pids"]:
                raise PoolError(
                    f"pool {config.name!r} is in use by run {found['run']!r} with other settings "
                    f"(processes {found['live_pids']})",
                    hint="choose another pool.name, or stop it with `seer pool down`",
                )
        if config.must_exist:
            raise _no_such_pool(files, config, lock)
        _unlink(files)
        try:
            _create(files, config, run)
        except BaseException:
            _remove_free_locks(files, lock)  # nothing of a pool that was refused stays
            raise
    reclaim_stale(config.dram_dir, keep=config.name)
    return files, True


def _no_such_pool(files: PoolFiles, config: LocalPoolConfig, lock: file_lock.FileLock) -> PoolError:
    if not os.path.lexists(files.arena):
        _remove_free_locks(files, lock)  # looking has made them
    return PoolError(
        f"there is no pool named {config.name!r} in {config.dram_dir} with these settings",
        hint="it was removed: the process that made it has ended",
    )


def remove_files(files: PoolFiles) -> None:
    """Delete a pool's files; processes that still use it keep their memory until they leave."""
    with _locked(files) as lock:
        _unlink(files)
        _remove_free_locks(files, lock)


def remove_if_stale(files: PoolFiles) -> bool:
    """Delete a pool's files if no process uses it; False if one does, or its files are being changed just now."""
    try:
        with _locked(files, deadline_s=0) as lock:
            if not _look(files).stale:
                return False
            _unlink(files)
            _remove_free_locks(files, lock)
            return True
    except (SeerError, OSError):
        return False


def reclaim_stale(dram_dir: str, keep: str = "", least_age_s: float | None = None) -> list[str]:
    """Remove the pools of dead runs, however they were named, except `keep`; returns their names.

    Younger ones than `least_age_s` (a minute by default) stay. What was left without an arena has no age.
    """
    least_age_s = _STALE_AFTER_S if least_age_s is None else least_age_s
    gone = []
    for files in all_files(dram_dir):
        created = _created_unix_s(files.arena)
        if files.name == keep or (created is not None and time.time() - created < least_age_s):
            continue
        if remove_if_stale(files) and created is not None:
            gone.append(files.name)
    return gone


def all_files(dram_dir: str) -> list[PoolFiles]:
    """Pools of which any file is there, by name."""
    folder = private_files.find_folder(dram_dir)
    if folder is None:
        return []
    names = set()
    for entry in os.listdir(folder):
        match = _FILE.fullmatch(entry)
        if match is None:
            continue  # of other parts of Seer
        if _NAME.fullmatch(match["name"]):
            names.add(match["name"])
        else:
            log.warning("%r in %s is ignored: it is no name of a pool's file", entry, folder)
    return [PoolFiles(name, folder) for name in sorted(names)]


def find_pools(dram_dir: str = "/dev/shm") -> list[FoundPool]:
    """Every pool of this user in a folder."""
    return [_look(files) for files in all_files(dram_dir) if os.path.lexists(files.arena)]


def _look(files: PoolFiles) -> FoundPool:
    """What is there now."""
    arena, slab = str(files.arena), files.slab()
    try:
        has_owner = file_lock.is_held(files.owner)
    except SeerError:
        has_owner = False  # not a lock file that any process of ours could hold
    try:
        probe = _arena.probe(arena)
    except PoolError as error:
        return FoundPool(files.name, arena, slab, "", 0, [], has_owner, str(error))
    return FoundPool(files.name, arena, slab, probe["run"], probe["file_bytes"], probe["live_pids"], has_owner)


def _unlink(files: PoolFiles) -> None:
    slab = files.slab()
    if slab:
        private_files.remove(Path(slab))
    _remove_written(files.arena)
    _remove_written(files.note)


def _remove_free_locks(files: PoolFiles, held: file_lock.FileLock) -> None:
    with contextlib.suppress(SeerError):
        owner = file_lock.FileLock.acquire(files.owner)
        if owner is not None:  # else the state and the lock are those of a living process, which removes them
            _remove_written(files.state)
            owner.release()
    held.path.unlink(missing_ok=True)


def _remove_written(path: Path) -> None:
    private_files.remove(path)
    private_files.remove(path.with_name(f"{path.name}.tmp"))  # of a process that was killed while writing


def _create(files: PoolFiles, config: LocalPoolConfig, run: str) -> None:
    slots = (config.stride_bytes, config.dram_slots, config.ssd_slots, config.num_pins)
    needed = _arena.file_bytes(*slots)
    _check_memory(needed, config)
    slab = ""
    if config.ssd_slots:
        folder = Path(config.ssd_dir)
        _check_folder(folder, "pool.ssd_dir")
        slab = str(private_files.folder(folder.absolute()) / files.arena.with_suffix(".slab").name)
        free = _free_bytes(folder) + _size(slab)
        if config.ssd_bytes + 4096 > free:
            raise PoolError(
                f"pool.ssd_bytes={config.ssd_bytes} does not fit in {config.ssd_dir}: {free} bytes are free",
                hint="lower pool.ssd_bytes or choose another pool.ssd_dir",
            )
    private_files.write(files.note, msgspec.json.encode(Note(run=run, slab=slab, created_unix_s=time.time())))
    try:
        _arena.create(
            str(files.arena),
            slab,
            config.block_bytes,
            config.dram_slots,
            config.ssd_slots,
            config.num_pins,
            secrets.token_bytes(16),
            run,
        )
    except BaseException:
        files.note.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(files: PoolFiles, deadline_s: float = _LOCK_DEADLINE_S) -> Iterator[file_lock.FileLock]:
    """Only one process at a time looks, creates or removes."""
    lock = file_lock.FileLock.acquire(files.lock, deadline_s)
    if lock is None:
        raise PoolError(f"{files.lock} was locked for {deadline_s:g} s by another process")
    try:
        yield lock
    finally:
        lock.release(remove_file=False)


def _same_sizes(found: _arena.ArenaProbe, config: LocalPoolConfig) -> bool:
    return (found["slot_bytes"], found["dram_slots"], found["ssd_slots"]) == (
        config.block_bytes,
        config.dram_slots,
        config.ssd_slots,
    )


def _check_folder(folder: Path, setting: str) -> None:
    if not folder.is_dir():
        raise PoolError(f"{setting}={folder} is not a folder", hint="create it, or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PoolError(f"{setting}={folder} is read-only", hint="name a folder this user can write to")


def _check_memory(needed: int, config: LocalPoolConfig) -> None:
    available, reason = _available_bytes()
    free = _free_bytes(Path(config.dram_dir))
    if free < available:
        available, reason = free, f"{config.dram_dir} has {free} bytes free"
    if needed > available:
        raise PoolError(
            f"pool.dram_bytes={config.dram_bytes} needs {needed} bytes of memory: {reason}",
            hint="lower pool.dram_bytes, or free what dead runs left with `seer pool down --stale`",
        )


def _available_bytes() -> tuple[int, str]:
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    reason = f"the machine has {available} bytes available"
    try:  # inside a container the group's limit comes first
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available, reason
    if limit != "max" and int(limit) - used < available:
        available = max(int(limit) - used, 0)
        reason = f"the control group has {available} bytes left"
    return available, reason


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _created_unix_s(path: Path) -> float | None:
    """When the file was created or replaced; None if it is gone."""
    try:
        return os.lstat(path).st_ctime
    except FileNotFoundError:
        return None


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
