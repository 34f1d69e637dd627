# SPDX-License-Identifier: Apache-2.0
"""Calls in threads of their own: their answers come back, and one that hangs keeps no program from ending."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextvars import ContextVar

import pytest

import seer
from seer.errors import SeerError
from seer.machine.daemon_thread import in_daemon_thread

HANGS = """
import asyncio, threading
from seer.machine.daemon_thread import in_daemon_thread

async def main():
    call = asyncio.ensure_future(in_daemon_thread("hangs", threading.Event().wait))
    await asyncio.sleep(0)
    call.cancel()

asyncio.run(main())
"""


def test_what_a_call_returns_or_raises_comes_back() -> None:
    assert asyncio.run(in_daemon_thread("sums", sum, [1, 2, 3])) == 6
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_daemon_thread("divides", divmod, 1, 0))


def test_users_have_to_thread_for_code_that_may_hang() -> None:
    variable: ContextVar[int] = ContextVar("variable")
    variable.set(3)
    assert asyncio.run(seer.in_thread(variable.get)) == 3
    assert asyncio.run(seer.in_thread(sorted, [1, 2], reverse=True)) == [2, 1]


def test_no_exception_of_a_thread_is_lost_and_none_ends_the_event_loop() -> None:
    with pytest.raises(SeerError, match="SystemExit: 3"):
        asyncio.run(in_daemon_thread("exits", sys.exit, 3))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(in_daemon_thread("runs out", next, iter([])))


def test_a_program_ends_while_a_call_hangs() -> None:
    assert subprocess.run([sys.executable, "-c", HANGS], timeout=60, check=False).returncode == 0
