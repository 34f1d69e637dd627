# SPDX-License-Identifier: Apache-2.0
"""Run Python code in a process of its own, limited in time, memory and output, without network and other processes.

The code's inside is sandbox_main.py. It keeps mistakes and runaway code of a model away from the training machine; for
code that is out to attack the kernel, run the whole rollout in a container or a virtual machine.

Invariants
  1. A call ends within its time limit and what the kernel needs to end a process.
  2. Nothing is left behind: code that makes another process dies of it before that exists, and its own is ended and
     collected, however the call ends, a cancellation included.
  3. No more than `max_output_bytes` are ever held of what it prints.

Waits for                                    unblocked by
  a place                                      the end of one of `max_processes` calls
  output or the process's end                  the process, `time_s`
"""

from __future__ import annotations

import asyncio
import math
import platform
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from seer.errors import ConfigError, SeerError
from seer.ranges import Count, NumBytes, Seconds, check_fields

_INSIDE = Path(__file__).with_name("sandbox_main.py")
_NO_SANDBOX = 3, "the sandbox cannot be made"
"""Exit status of sandbox_main.py and what it prints first when its limits cannot be set."""


class ToolError(SeerError):
    """The code broke a limit or tried to fork, or its process died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one call may use."""

    time_s: Seconds = 5.0
    memory_bytes: NumBytes = 512 << 20
    max_output_bytes: NumBytes = 16 << 10
    max_processes: Count = 16
    """Calls that run at once in an event loop; more wait for a place, and their time counts from when they have one."""

    def __post_init__(self) -> None:
        """Refuse what is no limit."""
        check_fields(self)


class PythonSandbox:
    """Runs pieces of code, each in a fresh interpreter without site packages."""

    def __init__(self, limits: SandboxLimits | None = None, *, python: str = sys.executable) -> None:
        if sys.platform != "linux" or platform.machine() != "x86_64":
            raise ConfigError(
                f"the Python sandbox needs Linux on x86-64, this is {sys.platform} on {platform.machine()}",
                hint="call a sandbox service of your own from the environment",
            )
        self.limits = limits or SandboxLimits()
        self._command: Sequence[str] = [
            python,
            "-I",
            "-S",
            str(_INSIDE),
            str(self.limits.memory_bytes),
            str(math.ceil(self.limits.time_s) + 1),
        ]
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        """One environment may serve several rollouts, each with a loop of its own; a semaphore serves one loop."""

    async def run(self, code: str) -> str:
        """What the code printed, with the traceback if it raised; `ToolError` if it broke a limit, forked or died."""
        async with self._places_of(asyncio.get_running_loop()):
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, env={}, cwd="/", start_new_session=True
            )
            try:
                async with asyncio.timeout(self.limits.time_s):
                    output = await self._talk(process, code)
                    await process.wait()
            except TimeoutError:
                raise ToolError(f"the code ran longer than {self.limits.time_s:g} s") from None
            finally:
                await _end(process)
        return self._result(process, output)

    def _places_of(self, loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
        if loop not in self._places:
            self._places[loop] = asyncio.Semaphore(self.limits.max_processes)
        return self._places[loop]

    async def _talk(self, process: Process, code: str) -> bytes:
        assert process.stdin is not None, "its input is a pipe"
        assert process.stdout is not None, "its output is a pipe"
        try:
            process.stdin.write(code.encode(errors="replace"))
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died before it read the code; its exit status says why
        process.stdin.close()
        output = bytearray()
        while piece := await process.stdout.read(1 << 16):
            output += piece
            if len(output) > self.limits.max_output_bytes:
                raise ToolError(f"the code printed more than {self.limits.max_output_bytes:,} bytes")
        return bytes(output)

    @staticmethod
    def _result(process: Process, output: bytes) -> str:
        text, status = output.decode(errors="replace"), process.returncode
        if status == _NO_SANDBOX[0] and text.startswith(_NO_SANDBOX[1]):
            raise ToolError(text.strip())
        if status == -signal.SIGSYS:
            raise ToolError("the code tried to make another process")
        if status is not None and status < 0:
            raise ToolError(f"the code's process died of signal {-status}")
        return text


async def _end(process: Process) -> None:
    """End the process and collect it; a cancellation does not keep it from being collected."""
    if process.returncode is None:
        process.kill()
    await asyncio.shield(asyncio.ensure_future(_collect(process)))


async def _collect(process: Process) -> None:
    while process.stdout is not None and await process.stdout.read(1 << 16):
        pass  # what a dead process printed: its pipe is not closed before it is empty
    await process.wait()
