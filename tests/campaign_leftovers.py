# SPDX-License-Identifier: Apache-2.0
"""What a part of the fault campaign left: processes by a mark in their environment, files where all files are its own.

tests/crash/campaign.py gives each process of a campaign its own /dev/shm and temporary folder where it may (it says so
with SEER_FAULT_PRIVATE). Then every file there counts; elsewhere other programs have files as well.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from pathlib import Path

MARK = secrets.token_hex(8)
os.environ["SEER_FAULT_MARK"] = MARK  # for every process that is started from here
IS_PRIVATE = "SEER_FAULT_PRIVATE" in os.environ
_TRACKER = "multiprocessing.resource_tracker"
"""Of this process itself: it lives as long."""
PATIENCE_S = 20.0
"""For processes whose parent was killed: they end by themselves."""


def processes() -> list[int]:
    """Every living process that comes from this one, also through others that have ended."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                is_ours = f"SEER_FAULT_MARK={MARK}".encode() in (process / "environ").read_bytes().split(b"\0")
                is_zombie = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:  # it has ended
                continue
            if is_ours and not is_zombie and _TRACKER not in _command(int(process.name)):
                found.append(int(process.name))
    return found


def files() -> list[str]:
    """Everything in shared memory and among the temporary files, but pytest's own."""
    if not IS_PRIVATE:
        return []
    found = [*Path("/dev/shm").rglob("*"), *Path(tempfile.gettempdir()).glob("*")]
    found += [path for folder in Path(tempfile.gettempdir()).glob("seer-*") for path in folder.rglob("*")]
    return [str(path) for path in found if not _is_expected(path)]


def _is_expected(path: Path) -> bool:
    """pytest's folders, logs that Ray keeps of a cluster, PyTorch's store of compiled kernels, and our empty folder."""
    if f"seer-{os.getuid()}/kernels" in str(path):
        return True
    if not path.is_dir():
        return False
    return path.name.startswith(("pytest-", "torchinductor_")) or path.name in ("ray", f"seer-{os.getuid()}")


def leftovers(before: set[int], *, with_files: bool = True) -> list[str]:
    """What is left, after some patience, beside the processes `before`: a process by its command."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (found := set(processes()) - before) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return [f"{pid}: {_command(pid)}" for pid in found] + (files() if with_files else [])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(bytes(1), b" ").decode(errors="replace")
    except OSError:
        return ""
