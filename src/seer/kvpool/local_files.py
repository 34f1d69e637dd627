"""Where the local pool keeps its files, and whether it may use them.

Three files per pool: `<dram_dir>/seer-pool-<uid>-<name>.arena` (shared memory), `<ssd_dir>/….slab` (SSD tier)
and `<dram_dir>/….json` (a note with the slab's path). `<dram_dir>/….lock` lets one process at a time create.

Invariants
  1. Every file is readable and writable by its owner alone; one that is not is refused, never adopted.
  2. An arena is taken over only from the same run. One of another run is refused while any of its processes
     lives, and removed when none does: that is what a dead run leaves behind. Creating a pool also removes the
     dead ones of other names, once they are a minute old.
  3. What cannot work is refused before anything is written, in one line: a missing or read-only folder, a
     full disk, an arena larger than memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from seer.errors import ConfigError, PoolError
from seer.kvpool import _arena

_MIN_SLOTS = 4  # a smaller DRAM tier is a mistake in a size
_MAX_SLOTS = 2**24 - 2  # a slot number has 24 bits (csrc/kvpool/layout.h)
_LOCK_DEADLINE_S = 30.0  # another process may be creating a large arena
_STALE_AFTER_S = 60.0  # an arena this young may be between its creation and its first user
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


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
    """Folder of the SSD tier's file; must exist."""

    name: str = "default"
    """Processes that give the same name share a pool."""

    run: str = ""
    """Which run the pool belongs to; a pool of a dead run is removed, one of a living run is refused. Empty:
    the name."""

    dram_dir: str = "/dev/shm"
    """Folder of the arena; on tmpfs, else it is no DRAM tier."""

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

    arena: Path
    note: Path
    lock: Path

    @classmethod
    def named(cls, name: str, dram_dir: str) -> PoolFiles:
        """The paths that belong to a name."""
        check_name(name)
        stem = Path(dram_dir) / f"seer-pool-{os.geteuid()}-{name}"
        return cls(Path(f"{stem}.arena"), Path(f"{stem}.json"), Path(f"{stem}.lock"))

    def slab(self) -> str:
        """Path of the SSD file, from the note; empty when there is none."""
        try:
            return msgspec.json.decode(self.note.read_bytes(), type=Note).slab
        except (OSError, msgspec.DecodeError):
            return ""


class FoundPool(msgspec.Struct, frozen=True):
    """One arena found in a folder."""

    name: str
    arena: str
    slab: str
    run: str
    file_bytes: int
    live_pids: list[int]
    problem: str = ""
    """Why the arena cannot be used, if it cannot."""

    @property
    def stale(self) -> bool:
        """No process uses it."""
        return not self.live_pids


def check_name(name: str) -> None:
    """Refuse a name that is no plain file name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"pool name {name!r} is not made of 1 to 64 letters, digits, '.', '_' or '-'")


def open_files(config: LocalPoolConfig) -> tuple[PoolFiles, bool]:
    """Make or find the files of a pool; True when they were made now."""
    files = PoolFiles.named(config.name, config.dram_dir)
    _check_folder(Path(config.dram_dir), "pool.dram_dir")
    run = config.run or config.name
    with _locked(files):
        if files.arena.exists():
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
            _unlink(files)
        _create(files, config, run)
    reclaim_stale(config.dram_dir, keep=config.name)
    return files, True


def remove_files(files: PoolFiles) -> None:
    """Delete a pool's files; processes that still use it keep their memory until they leave."""
    with _locked(files):
        _unlink(files)
        files.lock.unlink(missing_ok=True)


def reclaim_stale(dram_dir: str, keep: str = "") -> list[str]:
    """Remove the pools of dead runs, however they were named, except `keep`; returns their names."""
    gone = []
    for found in find_pools(dram_dir):
        files = PoolFiles.named(found.name, dram_dir)
        if found.name == keep or not found.stale or time.time() - _changed(files.arena) < _STALE_AFTER_S:
            continue
        with contextlib.suppress(PoolError, OSError), _locked(files, deadline_s=0):
            # Looked at again under the lock: a process may have joined it since.
            if not any(again.stale for again in find_pools(dram_dir) if again.name == found.name):
                continue
            _unlink(files)
            files.lock.unlink(missing_ok=True)
            gone.append(found.name)
    return gone


def _unlink(files: PoolFiles) -> None:
    slab = files.slab()
    for path in (str(files.arena), slab, str(files.note)):
        if path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def find_pools(dram_dir: str = "/dev/shm") -> list[FoundPool]:
    """Every pool of this user in a folder."""
    prefix = f"seer-pool-{os.geteuid()}-"
    pools = []
    for arena in sorted(Path(dram_dir).glob(f"{prefix}*.arena")):
        name = arena.name.removeprefix(prefix).removesuffix(".arena")
        slab = PoolFiles.named(name, dram_dir).slab()
        try:
            probe = _arena.probe(str(arena))
        except PoolError as error:
            pools.append(FoundPool(name, str(arena), slab, "", 0, [], str(error)))
            continue
        pools.append(FoundPool(name, str(arena), slab, probe["run"], probe["file_bytes"], probe["live_pids"]))
    return pools


def _create(files: PoolFiles, config: LocalPoolConfig, run: str) -> None:
    slots = (config.stride_bytes, config.dram_slots, config.ssd_slots, config.num_pins)
    needed = _arena.file_bytes(*slots)
    _check_memory(needed, config)
    slab = ""
    if config.ssd_slots:
        folder = Path(config.ssd_dir)
        _check_folder(folder, "pool.ssd_dir")
        slab = str((folder / files.arena.with_suffix(".slab").name).absolute())
        free = _free_bytes(folder) + _size(slab)
        if config.ssd_bytes + 4096 > free:
            raise PoolError(
                f"pool.ssd_bytes={config.ssd_bytes} does not fit in {config.ssd_dir}: {free} bytes are free",
                hint="lower pool.ssd_bytes or choose another pool.ssd_dir",
            )
    note = msgspec.json.encode(Note(run=run, slab=slab, created_unix_s=time.time()))
    descriptor = os.open(files.note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(note)
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
def _locked(files: PoolFiles, deadline_s: float = _LOCK_DEADLINE_S) -> Iterator[None]:
    """Only one process at a time looks, creates or removes."""
    deadline = time.monotonic() + deadline_s
    while True:
        descriptor = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file(descriptor, files.lock):
                break
            # Its last owner removed the file while we waited: what we locked is no longer what others will.
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise PoolError(f"{files.lock} was locked for {deadline_s:g} s by another process") from None
            time.sleep(0.02)  # flock has no deadline of its own
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


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


def _changed(path: Path) -> float:
    """When the file was created or replaced; now, if it is gone."""
    try:
        return path.stat().st_ctime
    except FileNotFoundError:
        return time.time()


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
