# SPDX-License-Identifier: Apache-2.0
"""The process that keeps a pool running: `seer pool up` starts it, `seer pool down` ends it.

    python -m seer.kvpool.serve '<json of ServeSpec>'

For `local` it creates the arena and is its keeper, so that the pool stays warm between runs and no worker has
to spill. For `mooncake` it runs the master and the owner and restarts what dies. It writes one state file
when everything answers, and removes it and the pool when it gets a signal to end.

Invariants
  1. The pool's owner lock is held for the life of this process. A state file without it is one that a killed process
     left, and means nothing.
  2. The state file is written only while the pool is usable, whole or not at all.
  3. On SIGTERM or SIGINT everything started here is stopped and every file made here is removed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from seer.errors import ConfigError, PoolError, SeerError
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig, PoolFiles
from seer.kvpool.mooncake_servers import (
    NAMESPACE_RECIPE,
    MooncakeServers,
    MooncakeServersConfig,
    wildcard_listeners,
)
from seer.machine import file_lock, owned_folders, private_files

_WATCH_S = 1.0  # how often dead Mooncake processes are looked for


class ServeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which pool to run."""

    backend: str
    name: str
    dram_dir: str
    dram_bytes: int
    ssd_bytes: int = 0
    ssd_dir: str = ""
    block_bytes: int = 0
    run: str = ""
    host: str = "127.0.0.1"
    log_dir: str = ""
    """Folder of the logs of this process and of Mooncake's."""
    log_is_temporary: bool = False
    """Remove the logs at a normal end."""


class ServeState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the state file."""

    backend: str
    name: str
    pid: int
    pid_started: int
    """Start time of that process, in clock ticks: a pid is used again, this pair is not."""
    since_unix_s: float
    addresses: dict[str, str] = {}
    pids: dict[str, int] = {}
    warnings: list[str] = []


def pid_started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def hold_local(spec: ServeSpec, ended: threading.Event) -> None:
    """Keep a local pool open, as its keeper."""
    config = LocalPoolConfig(
        name=spec.name,
        run=spec.run,
        dram_dir=spec.dram_dir,
        block_bytes=spec.block_bytes,
        dram_bytes=spec.dram_bytes,
        ssd_bytes=spec.ssd_bytes,
        ssd_dir=spec.ssd_dir,
    )
    pool = LocalPool(config)
    try:
        _write_state(spec, {}, {}, [])
        ended.wait()
    finally:
        pool.close(remove=True)


def hold_mooncake(spec: ServeSpec, ended: threading.Event) -> None:
    """Keep a Mooncake store running."""
    config = MooncakeServersConfig(
        dram_bytes=spec.dram_bytes,
        ssd_bytes=spec.ssd_bytes,
        ssd_dir=spec.ssd_dir,
        host=spec.host,
        log_dir=spec.log_dir,
    )
    with MooncakeServers(config) as servers:
        addresses = {
            "master": servers.master_address,
            "owner": servers.owner_address,
            "metrics": servers.metrics_address,
        }
        _write_state(spec, addresses, servers.pids, exposure_warnings(servers.pids))
        while not ended.wait(_WATCH_S):
            before = servers.pids
            for note in servers.watch():
                print(note, flush=True)
            if servers.pids != before:
                _write_state(spec, addresses, servers.pids, exposure_warnings(servers.pids))


def exposure_warnings(pids: dict[str, int]) -> list[str]:
    """One line per process that other machines can reach."""
    warnings = []
    for name, pid in pids.items():
        ports = wildcard_listeners(pid)
        if ports:
            warnings.append(
                f"Mooncake's {name} listens on every interface (ports {', '.join(map(str, ports))}) without "
                f"authentication, and has no setting for it; close them: {NAMESPACE_RECIPE}"
            )
    return warnings


def _write_state(spec: ServeSpec, addresses: dict[str, str], pids: dict[str, int], warnings: list[str]) -> None:
    state = ServeState(
        backend=spec.backend,
        name=spec.name,
        pid=os.getpid(),
        pid_started=pid_started(os.getpid()) or 0,
        since_unix_s=time.time(),
        addresses=addresses,
        pids=pids,
        warnings=warnings,
    )
    private_files.write(PoolFiles.named(spec.name, spec.dram_dir).state, msgspec.json.encode(state))


def main(arguments: list[str]) -> int:
    """Run the pool until a signal; one line on stderr when it cannot start."""
    spec = msgspec.json.decode(arguments[0], type=ServeSpec)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        files = PoolFiles.named(spec.name, spec.dram_dir)
        owner = file_lock.FileLock.acquire(files.owner)
        if owner is None:
            raise PoolError(f"pool {spec.name!r} is up already", hint="see `seer pool status`")
        try:
            private_files.remove(files.state)  # of a process that was killed: with the lock it would be believed
            (hold_local if spec.backend == "local" else hold_mooncake)(spec, ended)
        finally:
            private_files.remove(files.state)
            owner.release()
    except SeerError as error:
        kind = "config" if isinstance(error, ConfigError) else "pool"
        print(msgspec.json.encode({"error": str(error), "hint": error.hint, "kind": kind}).decode(), file=sys.stderr)
        return 2
    if spec.log_is_temporary:
        owned_folders.remove_folder(Path(spec.log_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
