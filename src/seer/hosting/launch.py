"""Start and end one child process: its socket, its log, its exit status.

The child is a fresh interpreter (never a fork: torch and threads do not survive one) in a session of its
own, so that a Ctrl-C in the terminal reaches the driver alone and the driver decides what becomes of the
instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

LAST_WORDS_BYTES = 2000
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM")


def core_for(instance: int) -> int:
    """The CPU core of an instance: round robin over those this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[instance % len(cores)]


class ChildProcess:
    """One launched child: a module of ours, given its end of the socket as a descriptor."""

    def __init__(
        self,
        name: str,
        log_dir: Path | None,
        *,
        module: str,
        single_thread: bool,
        arguments: Sequence[str] = (),
    ) -> None:
        ours, theirs = socket.socketpair()
        self.socket = ours
        self._log = _open_log(name, log_dir)
        # The child finds modules where the driver finds them, its own instance's factory included.
        environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        if single_thread:
            # Before numpy or torch is imported: afterwards their thread pools have been sized.
            environment.update(dict.fromkeys(_ONE_THREAD, "1"), TOKENIZERS_PARALLELISM="false")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """For people and for tests that kill it."""
        return self._process.pid

    def kill(self) -> None:
        """End it now, with every process it started: it leads a group of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self, deadline_s: float) -> None:
        """Wait for its exit; kill it when the deadline passes."""
        try:
            await asyncio.to_thread(self._process.wait, deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            await asyncio.to_thread(self._process.wait)

    def exit_cause(self) -> str:
        """How it ended, and the last lines it wrote."""
        status = self._process.poll()
        if status is None:
            how = "it is still running"
        elif status < 0:
            how = f"killed by {signal.Signals(-status).name}"
        else:
            how = f"exit status {status}"
        words = self.last_words()
        return f"{how}; its last words:\n{words}" if words else how

    def last_words(self) -> str:
        """The end of its log."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        start = max(0, size - LAST_WORDS_BYTES)
        return os.pread(self._log.fileno(), LAST_WORDS_BYTES, start).decode(errors="replace").strip()

    def close(self) -> None:
        """Let go of the log; the process must have ended."""
        assert self._process.poll() is not None, f"process {self.pid} still runs"
        self._log.close()


def _open_log(name: str, log_dir: Path | None) -> IO[bytes]:
    if log_dir is None:
        return tempfile.TemporaryFile()
    log_dir.mkdir(parents=True, exist_ok=True)
    return (log_dir / f"{name}.log").open("ab+")
