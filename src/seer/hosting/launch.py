# SPDX-License-Identifier: Apache-2.0
"""Starts and ends one child process: its socket, its log, its exit status.

The child is a new interpreter (not a fork: torch and threads do not survive one) in its own session. A Ctrl-C in the
terminal reaches the driver only, which then ends its children.

It imports what the driver imports, except from the current folder: a file there with the name of a module (numpy.py)
must not run inside instances.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from seer.errors import InputError
from seer.hosting.log_cause import root_error
from seer.machine.daemon_thread import in_thread

LOG_TAIL_BYTES = 2000
"""Quoted from a child's log when it dies: about the length of a Python traceback."""
SEARCHED_LOG_BYTES = 1 << 20
"""Of a log's end: the error that ended a process may stand pages before it."""
MAX_LOG_BYTES = 64 << 20
"""Of one child's log. A longer one loses its beginning: the end says why a process died."""
KEPT_LOG_BYTES = 1 << 20
"""What stays of a log that got too long."""
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM")
"""Variables that size thread pools; an instance pinned to one core has no use for more than one thread."""


def module_folders(needed: Sequence[str]) -> list[str]:
    """The folders of `sys.path` that a child may import from.

    The current folder is not one of them, unless the user put it into PYTHONPATH as an absolute path, or a module of
    `needed` is there.
    """
    wanted = {entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)}
    wanted.update(*map(_folders_of, needed))
    # Relative entries, such as the '' of `python -c`, name the current folder or one in it.
    return [entry for entry in sys.path if os.path.isabs(entry) and (entry in wanted or not _is_current(entry))]


def _folders_of(module: str) -> set[str]:
    """The folders that hold a module or its package; an editable install may have several."""
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # it was made by hand and has no specification
        spec = None
    if spec is None:
        return set()
    places = [*(spec.submodule_search_locations or ())] or [spec.origin or ""]
    return {os.path.dirname(os.path.abspath(place)) for place in places if place}


def _is_current(folder: str) -> bool:
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:  # one of the two does not exist
        return False


class ChildProcess:
    """One child process: it runs a module of Seer, with its end of the socket as a descriptor."""

    def __init__(
        self,
        name: str,
        log_dir: Path | None,
        *,
        module: str,
        single_thread: bool,
        arguments: Sequence[str] = (),
        imports: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`imports` names modules that it must find, such as the one with the factory of its instance; `environment`
        is added to this process's own.
        """
        self._log = open_log(name, log_dir)
        self._log_start = os.fstat(self._log.fileno()).st_size  # before it is what earlier processes of this name wrote
        ours, theirs = socket.socketpair()
        self.socket = ours
        variables = {**os.environ, **(environment or {})} | {
            "PYTHONPATH": os.pathsep.join(module_folders((module, *imports))),
            "PYTHONSAFEPATH": "1",  # `python -m` does not look in the current folder, nor do the child's own children
        }
        if single_thread:
            # Before numpy or torch is imported: afterwards their thread pools have been sized.
            variables.update(dict.fromkeys(_ONE_THREAD, "1"), TOKENIZERS_PARALLELISM="false")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it now, with every process it started: it leads its own process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self, deadline_s: float) -> None:
        """Wait for its exit; kill it when the deadline passes."""
        try:
            await in_thread(self._process.wait, deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            await in_thread(self._process.wait)

    async def ended(self) -> None:
        """Wait for its exit, however long that takes."""
        await in_thread(self._process.wait)

    def exit_cause(self) -> str:
        """How it ended, the error that its log has for it, and the last lines it wrote."""
        status = self._process.poll()
        if status is None:
            how = "it is still running"
        elif status < 0:
            how = f"killed by {signal.Signals(-status).name}"
        else:
            how = f"exit status {status}"
        tail = self.log_tail()
        error = root_error(self._end_of_log(SEARCHED_LOG_BYTES)) if status is not None and status >= 0 else None
        if error is not None and error not in tail:
            how += f"; in its log: {error}"
        return f"{how}; the end of its log:\n{tail}" if tail else how

    def log_tail(self) -> str:
        """The last LOG_TAIL_BYTES that it wrote."""
        return self._end_of_log(LOG_TAIL_BYTES)

    def _end_of_log(self, num_bytes: int) -> str:
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        start = max(self._log_start, size - num_bytes)
        return os.pread(self._log.fileno(), num_bytes, start).decode(errors="replace").strip()

    @property
    def log_descriptor(self) -> int:
        """The file that it writes to, to be read."""
        return self._log.fileno()

    def bound_log(self) -> None:
        """Keep its log within the limit."""
        if bound_log(self._log.fileno()):
            self._log_start = 0

    def close(self) -> None:
        """Close the log; the process must have ended."""
        assert self._process.poll() is not None, f"process {self.pid} still runs"
        self._log.close()


def bound_log(log: int) -> bool:
    """Cut the beginning of a log that got too long; returns whether it did. What a child writes then may be lost."""
    size = os.fstat(log).st_size
    if size <= MAX_LOG_BYTES:
        return False
    kept = os.pread(log, KEPT_LOG_BYTES, size - KEPT_LOG_BYTES)
    os.ftruncate(log, 0)  # the child appends, so its next line follows what is written here
    with contextlib.suppress(OSError):  # the disk is full
        os.write(log, b"(the beginning of this log was cut off)\n" + kept)
    return True


def open_log(name: str, log_dir: Path | None) -> IO[bytes]:
    """The file `name`.log in a folder, to be appended to; a temporary file without one."""
    if log_dir is None:
        log = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open as long as the child
        fcntl.fcntl(log, fcntl.F_SETFL, fcntl.fcntl(log, fcntl.F_GETFL) | os.O_APPEND)
        return log
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / f"{name}.log"
    try:  # no link: the folder of a run that is resumed may come from somebody else
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}", hint=f"can you write to {log_dir}?") from None
    return os.fdopen(file, "ab+")
