# SPDX-License-Identifier: Apache-2.0
"""Start, find and stop the process that keeps a pool running (serve.py).

Invariants
  1. A pool is up while its owner lock is held; what a state file says without it is ignored.
  2. A process is signalled only through a handle of it (pidfd), and only after it was seen to hold the owner lock and
     to have begun when the state file says. Otherwise nothing is signalled, and the error says so.
  3. Every wait has a deadline; when starting fails, nothing started stays behind.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from seer.errors import ConfigError, DeadlineExceeded, PoolError, SeerError
from seer.kvpool.local_files import PoolFiles, all_files
from seer.kvpool.serve import ServeSpec, ServeState, pid_started
from seer.machine import file_lock, owned_folders, private_files
from seer.machine.json_files import UNREADABLE

log = logging.getLogger(__name__)

_START_DEADLINE_S = 90.0  # above what the Mooncake processes may take one after the other
_STOP_DEADLINE_S = 20.0  # what stopping both Mooncake processes takes at worst
_LOOK_S = 0.02  # short beside any start, and cheap
_children: dict[int, subprocess.Popen[bytes]] = {}  # started by this process, which must collect their exit status


def find_state(name: str, dram_dir: str) -> ServeState | None:
    """The state of a pool that is up; None when none is, or its process is gone."""
    files = PoolFiles.find(name, dram_dir)
    return _read(files) if files is not None else None


def find_states(dram_dir: str) -> list[ServeState]:
    """Every pool of this user that is up."""
    return [state for files in all_files(dram_dir) if (state := _read(files)) is not None]


def _read(files: PoolFiles) -> ServeState | None:
    try:
        if not file_lock.is_held(files.owner):
            return None
        state = msgspec.json.decode(private_files.read(files.state), type=ServeState)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE, SeerError) as error:
        log.warning("%s is ignored: %s", files.state, error)
        return None
    return state if state.name == files.name else None


def start(spec: ServeSpec) -> ServeState:
    """Start the process and wait until the pool is usable."""
    if find_state(spec.name, spec.dram_dir) is not None:
        raise PoolError(f"pool {spec.name!r} is up already", hint="see `seer pool status`")
    if not spec.log_dir:
        folder = owned_folders.make_folder("pool-logs", tempfile.gettempdir())
        spec = msgspec.structs.replace(spec, log_dir=str(folder), log_is_temporary=True)
    try:
        return _start(spec)
    finally:
        if spec.log_is_temporary:
            owned_folders.disown(Path(spec.log_dir))


def _start(spec: ServeSpec) -> ServeState:
    log_path = Path(spec.log_dir) / "serve.log"
    with open(log_path, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "seer.kvpool.serve", msgspec.json.encode(spec).decode()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # it outlives the command that started it
            pass_fds=[owned_folders.lock_descriptor(Path(spec.log_dir))] if spec.log_is_temporary else (),
        )
    deadline = time.monotonic() + _START_DEADLINE_S
    while time.monotonic() < deadline:
        state = find_state(spec.name, spec.dram_dir)
        if state is not None and state.pid == process.pid:
            _children[process.pid] = process
            return state
        if process.poll() is not None:
            raise _why(log_path, spec)
        time.sleep(_LOOK_S)
    process.kill()
    process.wait(_STOP_DEADLINE_S)
    raise DeadlineExceeded(f"starting pool {spec.name!r} (log: {log_path})", _START_DEADLINE_S)


def stop(state: ServeState, dram_dir: str = "/dev/shm") -> None:
    """End the process and wait until it has ended."""
    files = PoolFiles.find(state.name, dram_dir)
    if files is None or not file_lock.is_held(files.owner):
        return
    try:
        process = os.pidfd_open(state.pid)
    except OSError:
        raise _not_shown(state) from None
    try:
        # The handle stays that of one process. The looks below are at a number, but no other process can have had the
        # number between them if the one of the handle has not ended after them.
        is_shown = pid_started(state.pid) == state.pid_started and file_lock.holds(state.pid, files.owner)
        if _has_ended(process, 0.0):
            return
        if not is_shown:
            raise _not_shown(state)
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if not _has_ended(process, _STOP_DEADLINE_S):
            signal.pidfd_send_signal(process, signal.SIGKILL)
            raise PoolError(f"pool {state.name!r} did not stop in {_STOP_DEADLINE_S:g} s and was killed")
    finally:
        os.close(process)
    if state.pid in _children:
        _children.pop(state.pid).wait(_STOP_DEADLINE_S)


def _has_ended(process: int, wait_s: float) -> bool:
    """Whether the process of this handle ends within a time."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))


def _not_shown(state: ServeState) -> PoolError:
    return PoolError(
        f"pool {state.name!r} is in use, and process {state.pid} is not seen to hold its lock: nothing was stopped",
        hint="run `seer pool down` in the container in which the pool was started",
    )


def _why(log_path: Path, spec: ServeSpec) -> SeerError:
    """The error that the process reported before it ended; without one its logs are kept."""
    lines = log_path.read_text(errors="replace").strip().splitlines()
    try:
        reason = msgspec.json.decode(lines[-1], type=dict[str, str | None])
        kind = ConfigError if reason["kind"] == "config" else PoolError
        error = kind(reason["error"] or "", hint=reason["hint"])
    except (IndexError, KeyError, *UNREADABLE):
        return PoolError(f"pool {spec.name!r} did not start", hint=f"see {log_path}")
    if spec.log_is_temporary and spec.backend == "local":
        owned_folders.remove_folder(Path(spec.log_dir))
    return error
