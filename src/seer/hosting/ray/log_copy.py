# SPDX-License-Identifier: Apache-2.0
"""The log of a process on another node, copied into the run's folder while it is written.

Waits for                                    unblocked by
  the next part                                the node, or the end of the actor
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from seer.hosting.launch import bound_log, open_log

COPY_EVERY_S = 2.0

ReadLog = Callable[[int], Awaitable[tuple[int, bytes]]]
"""What was written after an offset, and where that ends."""


class LogCopy:
    """Copies when it is asked to, one part after the other."""

    def __init__(self, name: str, log_dir: Path | None, read: ReadLog) -> None:
        """Without a folder nothing is copied: the node keeps the log until the process has ended."""
        self._read = read
        self._file = open_log(name, log_dir) if log_dir is not None else None
        self._offset = 0
        self._copying: asyncio.Task[None] | None = None
        self._next_s = 0.0

    def copy_soon(self) -> None:
        """Copy what is new, if the last copy was a while ago; never waits."""
        now_s = asyncio.get_running_loop().time()
        is_busy = self._copying is not None and not self._copying.done()
        if self._file is not None and not is_busy and now_s >= self._next_s:
            self._next_s = now_s + COPY_EVERY_S
            self._copying = asyncio.create_task(self._copy())

    async def finish(self, deadline_s: float) -> None:
        """Copy the rest, as far as the node can be reached, and close the file."""
        if self._file is None:
            return
        if self._copying is not None:
            self._copying.cancel()
            await asyncio.gather(self._copying, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._copy()
        self._file.close()
        self._file = None

    async def _copy(self) -> None:
        assert self._file is not None, "there is a file to copy to"
        with contextlib.suppress(Exception):  # Ray's errors, a full disk: a log that is not whole loses no run
            while True:
                self._offset, part = await self._read(self._offset)
                if not part:
                    break
                os.write(self._file.fileno(), part)
            bound_log(self._file.fileno())
