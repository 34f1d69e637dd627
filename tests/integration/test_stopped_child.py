# SPDX-License-Identifier: Apache-2.0
"""An instance of a Ray cluster that is stopped, as by a debugger, does not outlive its killed actor."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

DEADLINE_S = 60.0
PARENT = """
import sys, time
from seer.hosting.launch import ChildProcess
child = ChildProcess("child", None, module="seer.hosting.child", single_thread=True, arguments=("dial",))
print(child.pid, flush=True)
time.sleep(600)
"""


def is_serving(pid: int) -> bool:
    """It waits for its dial: the kernel knows by then whose end is its own."""
    return "unix" in Path(f"/proc/{pid}/wchan").read_text()


def test_a_stopped_instance_ends_with_its_actor() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    ended = os.pidfd_open(pid)
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_serving(pid):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
        assert select.select([ended], [], [], DEADLINE_S / 4)[0], "it is still there"
    finally:
        parent.kill()
        parent.wait()
        os.close(ended)
        parent.stdout.close()
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
