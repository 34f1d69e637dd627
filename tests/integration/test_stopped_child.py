# SPDX-License-Identifier: Apache-2.0
"""A process of Seer that is stopped, as by a debugger, does not outlive the process that started it and was killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLINE_S = 60.0
PARENT = """
import sys, time
from seer.hosting.launch import ChildProcess
child = ChildProcess("child", None, module=sys.argv[1], single_thread=True, arguments=sys.argv[2:])
print(child.pid, flush=True)
time.sleep(600)
"""


def is_serving(pid: int) -> bool:
    """It waits for its first message: the kernel knows by then whose end is its own."""
    return "unix" in Path(f"/proc/{pid}/wchan").read_text()


@pytest.mark.parametrize(
    "command",
    [
        ["seer.hosting.child"],
        ["seer.hosting.child", "dial"],  # by a Ray actor
        ["seer.hosting.draft_server_process"],
        ["seer.verification.verifier_process"],
    ],
    ids=["instance", "dialled instance", "draft server", "verifier"],
)
def test_a_stopped_process_ends_with_its_parent(command: list[str]) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *command], stdout=subprocess.PIPE, text=True)
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
