# SPDX-License-Identifier: Apache-2.0
"""Code that a model wrote: run, limited, and gone afterwards."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import children
from seer.environments.python_sandbox import PythonSandbox, SandboxLimits, ToolError
from seer.environments.python_tool import find_code
from seer.errors import ConfigError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the filter is of Linux on x86-64"
)
FORKED = "tried to make another process"
QUICK = SandboxLimits(time_s=10.0, memory_bytes=256 << 20, max_output_bytes=4096)


def own_children() -> set[int]:
    return set(children(os.getpid()))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  other processes send no event
        await asyncio.sleep(0.01)


def run(code: str, limits: SandboxLimits = QUICK) -> str:
    before = own_children()
    try:
        return asyncio.run(PythonSandbox(limits).run(code))
    finally:
        assert own_children() <= before, "something was left behind"


def test_what_is_printed_comes_back_with_the_traceback_of_an_error() -> None:
    assert run("import math, fractions, re, json\nprint(math.comb(10, 3))") == "120\n"
    assert "ZeroDivisionError" in run("print('before')\n1 / 0")
    assert "SyntaxError" in run("print(")
    assert run("print('ü 😀')").strip() == "ü 😀"
    assert run("") == ""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "longer than 1 s"),
        ("import time; time.sleep(100)", "longer than 1 s"),
        ("import sys\nfor _ in range(1 << 20): sys.stdout.write('x' * 1024)", "more than 4,096 bytes"),
        ("import os; os.abort()", "died of signal"),
        ("import ctypes; ctypes.string_at(0)", "died of signal 11"),
        ("import os; os.fork()", FORKED),
        ("import os\ntry: os.fork()\nexcept OSError: pass", FORKED),
        ("import os; os.posix_spawn('/bin/true', ['true'], {})", FORKED),
        ("import subprocess; subprocess.run(['true'])", FORKED),
        ("import multiprocessing as m; m.get_context('fork').Process(target=print).start()", FORKED),
        ("import os, threading; t = threading.Thread(target=os.fork); t.start(); t.join()", FORKED),
        ("import ctypes; ctypes.CDLL(None).syscall(58)", FORKED),
        ("import ctypes; ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0)", FORKED),
    ],
)
def test_code_that_hangs_crashes_forks_or_prints_a_gigabyte_fails_with_its_reason(code: str, reason: str) -> None:
    limits = SandboxLimits(time_s=1.0 if "longer" in reason else 20.0, max_output_bytes=4096)
    with pytest.raises(ToolError, match=reason):
        run(code, limits)


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print('a'); raise ValueError('b')", "ValueError: b"),
        ("input()", "EOFError"),
        ("import sys; print('a'); sys.exit(3)", "a"),
        ("import os; os._exit(3)", ""),
        ("import sys; sys.exit('no answer')", "no answer"),
        ("def f(): f()\nf()", "RecursionError"),
    ],
)
def test_code_that_raises_or_exits_is_answered_with_what_it_printed(code: str, printed: str) -> None:
    assert printed in run(code)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.execv('/bin/true', ['true'])",
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.socketpair()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
        "open('MARK', 'w')",
        "open('MARK', 'a')",
        "import os; os.open('MARK', os.O_RDWR)",
        "import os; os.remove('MARK')",
        "import os; os.rename('MARK', 'MARK2')",
        "import os; os.mkdir('MARK2')",
        "import os; os.chmod('MARK', 0)",
        "import os; os.symlink('MARK', 'MARK2')",
        "import os; os.truncate('MARK', 0)",
        "import os; os.kill(os.getppid(), 0)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    ],
)
def test_it_can_neither_run_programs_nor_reach_the_network_nor_change_files(code: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.write_text("kept")
    printed = run(code.replace("MARK", str(mark)))
    assert "Error" in printed, printed
    assert mark.read_text() == "kept"
    assert os.listdir(tmp_path) == ["mark"]


NUMBERS = {
    "shmget": 29,
    "semget": 64,
    "msgget": 68,
    "mq_open": 240,
    "setpriority": 141,
    "sched_setaffinity": 203,
    "open_by_handle_at": 304,
    "fsopen": 430,
    "open_tree": 428,
    "settimeofday": 164,
    "clock_settime": 227,
    "sethostname": 170,
    "ioperm": 173,
    "kexec_file_load": 320,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_would_outlive_it_or_touch_others_is_refused(name: str) -> None:
    """With arguments that do nothing where a call is allowed: all zero is an error of another kind."""
    call = f"libc.syscall({NUMBERS[name]}, 0, 0, 0, 0, 0)"
    printed = run(f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint({call}, ctypes.get_errno())")
    assert printed == "-1 1\n", printed


@pytest.mark.parametrize(
    "limits", [{"time_s": float("nan")}, {"time_s": -1.0}, {"memory_bytes": 0}, {"max_processes": 0}, {"time_s": "5"}]
)
def test_limits_that_are_none_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SandboxLimits(**limits)


def test_text_that_is_no_call_is_no_code() -> None:
    assert find_code("<tool_call>" + "[" * 100_000) is None
    assert find_code("<tool_call>" * 100_000) is None
    assert find_code('<tool_call>{"arguments": {"code": "1"}}</tool_call>') == "1"


def test_memory_is_limited_and_threads_and_reading_are_allowed() -> None:
    assert "MemoryError" in run("x = bytearray(1 << 30)")
    assert run("import threading\nt = threading.Thread(target=print, args=('x',)); t.start(); t.join()") == "x\n"
    assert run("print(len(open('/proc/self/status').read()) > 0)") == "True\n"


def test_a_cancelled_call_leaves_no_process() -> None:
    async def scenario() -> None:
        before = own_children()
        task = asyncio.create_task(PythonSandbox(QUICK).run("while True: pass"))
        await until(lambda: not own_children() <= before)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: own_children() <= before)  # it is collected in the background

    asyncio.run(scenario())


def test_many_calls_share_few_processes() -> None:
    most = 0

    async def scenario() -> None:
        nonlocal most
        before = len(own_children())
        sandbox = PythonSandbox(SandboxLimits(time_s=30.0, max_processes=3))
        calls = [asyncio.create_task(sandbox.run(f"print({i})")) for i in range(12)]
        while not all(call.done() for call in calls):
            most = max(most, len(own_children()) - before)
            await asyncio.sleep(0.005)
        assert [await call for call in calls] == [f"{i}\n" for i in range(12)]

    asyncio.run(scenario())
    assert 1 <= most <= 3


def test_calls_wait_for_a_place_in_each_event_loop() -> None:
    sandbox = PythonSandbox(SandboxLimits(time_s=30.0, max_processes=1))

    async def scenario() -> list[str]:
        return await asyncio.gather(*(sandbox.run(f"print({i})") for i in range(3)))

    for _ in range(2):
        assert asyncio.run(scenario()) == ["0\n", "1\n", "2\n"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("I compute:\n```python\nprint(1)\n```\ndone", "print(1)\n"),
        ("```py\na\n```\n```python\nb\n```", "b\n"),
        ("```python\nprint(2)", "print(2)"),
        ('<tool_call>\n{"name": "python", "arguments": {"code": "print(3)"}}\n</tool_call>', "print(3)"),
        ('<tool_call>{"name": "python"}</tool_call>', None),
        ("<tool_call>[1, 2</tool_call>", None),
        ("The answer is 4.", None),
    ],
)
def test_code_is_found_in_a_turn(text: str, code: str | None) -> None:
    assert find_code(text) == code
