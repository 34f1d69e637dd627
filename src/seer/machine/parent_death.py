# SPDX-License-Identifier: Apache-2.0
"""The kernel ends a process with the one that started it, also while it is stopped and can watch nothing itself."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """End this process with the thread that started it; that thread must live as long as its process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
