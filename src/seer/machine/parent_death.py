# SPDX-License-Identifier: Apache-2.0
"""A process that ends with another one: by the kernel, also while it is stopped, or by a thread of its own.

The kernel watches the thread that started a process, and nothing else. `end_with_process` is for processes that another
program starts, from a thread that may end before.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """End this process with the thread that started it; that thread must live as long as its process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_process(pid: int) -> None:
    """End this process when another one ends, or now if it has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll()
        finally:  # without its watch, this process could outlive the other
            os._exit(1)

    threading.Thread(target=watch, name=f"seer-watch-{pid}", daemon=True).start()
