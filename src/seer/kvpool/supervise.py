"""Start, find and stop the process that keeps a pool running (serve.py).

Invariants
  1. A process is signalled only when it is the very one the state file names: same pid, same start time.
  2. Every wait has a deadline; when starting fails, nothing started stays behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from seer.errors import DeadlineExceeded, PoolError
from seer.kvpool.local_files import check_name
from seer.kvpool.serve import ServeSpec, ServeState, pid_started

_START_DEADLINE_S = 90.0  # above what the Mooncake processes may take one after the other
_STOP_DEADLINE_S = 20.0  # what stopping both Mooncake processes takes at worst
_LOOK_S = 0.02  # short beside any start, and cheap
_children: dict[int, subprocess.Popen[bytes]] = {}  # started by this process, which must collect their exit status


def state_path(name: str, dram_dir: str) -> Path:
    """Where the state of a pool of that name is kept."""
    check_name(name)
    return Path(dram_dir) / f"seer-pool-{os.geteuid()}-{name}.state"


def find_state(name: str, dram_dir: str) -> ServeState | None:
    """The state of a pool that is up; None when none is, or its process is gone."""
    try:
        state = msgspec.json.decode(state_path(name, dram_dir).read_bytes(), type=ServeState)
    except (OSError, msgspec.DecodeError):
        return None
    return state if pid_started(state.pid) == state.pid_started else None


def find_states(dram_dir: str) -> list[ServeState]:
    """Every pool of this user that is up."""
    prefix = f"seer-pool-{os.geteuid()}-"
    names = [p.name.removeprefix(prefix).removesuffix(".state") for p in Path(dram_dir).glob(f"{prefix}*.state")]
    return [state for name in sorted(names) if (state := find_state(name, dram_dir)) is not None]


def start(spec: ServeSpec) -> ServeState:
    """Start the process and wait until the pool is usable."""
    if find_state(spec.name, spec.dram_dir) is not None:
        raise PoolError(f"pool {spec.name!r} is up already", hint="see `seer pool status`")
    if not spec.log_dir:
        spec = msgspec.structs.replace(spec, log_dir=tempfile.mkdtemp(prefix="seer-pool-"), log_is_temporary=True)
    log = Path(spec.log_dir) / "serve.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "seer.kvpool.serve", msgspec.json.encode(spec).decode()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # it outlives the command that started it
        )
    deadline = time.monotonic() + _START_DEADLINE_S
    while time.monotonic() < deadline:
        state = find_state(spec.name, spec.dram_dir)
        if state is not None and state.pid == process.pid:
            _children[process.pid] = process
            return state
        if process.poll() is not None:
            raise _why(log, spec)
        time.sleep(_LOOK_S)
    process.kill()
    process.wait(_STOP_DEADLINE_S)
    raise DeadlineExceeded(f"starting pool {spec.name!r} (log: {log})", _START_DEADLINE_S)


def stop(state: ServeState) -> None:
    """End the process and wait until it has ended."""
    if pid_started(state.pid) != state.pid_started:
        return
    os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_DEADLINE_S
    while pid_started(state.pid) == state.pid_started:
        if time.monotonic() > deadline:
            os.kill(state.pid, signal.SIGKILL)
            raise PoolError(f"pool {state.name!r} did not stop in {_STOP_DEADLINE_S:g} s and was killed")
        time.sleep(_LOOK_S)
    if state.pid in _children:
        _children.pop(state.pid).wait(_STOP_DEADLINE_S)


def _why(log: Path, spec: ServeSpec) -> PoolError:
    """The error that the process reported before it ended; without one its logs are kept."""
    lines = log.read_text(errors="replace").strip().splitlines()
    try:
        reason = msgspec.json.decode(lines[-1], type=dict[str, str | None])
        error = PoolError(reason["error"] or "", hint=reason["hint"])
    except (IndexError, KeyError, msgspec.DecodeError):
        return PoolError(f"pool {spec.name!r} did not start", hint=f"see {log}")
    if spec.log_is_temporary and spec.backend == "local":
        shutil.rmtree(spec.log_dir, ignore_errors=True)
    return error
