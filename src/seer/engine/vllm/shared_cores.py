# SPDX-License-Identifier: Apache-2.0
"""On a CPU, the processes of an engine leave cores to others.

vLLM's scheduler and its workers look for each other's messages in a busy loop. Beside a GPU, the cores that it takes
have little else to do. On a CPU they compute the model, and with few of them every process that carries tokens to the
driver and to clients waits for a core each time it wakes up (docs/log.md). So on a CPU they sleep between two looks.

vLLM 0.26 to 0.33 have the function that is replaced here.
"""

from __future__ import annotations

import os
import time

LOOK_EVERY_S = 20e-6
"""A step on a CPU takes milliseconds and has about three such waits."""


def share_cores() -> None:
    """Sleep instead of spinning, in this process; beside a GPU nothing changes."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and hasattr(shm_broadcast, "sched_yield"):
        setattr(shm_broadcast, "sched_yield", _sleep)  # noqa: B010 - mypy knows it as imported


def worker_threads() -> int:
    """Threads that compute: one core is left to vLLM's scheduler, as vLLM does where it pins them itself."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _sleep() -> None:
    time.sleep(LOOK_EVERY_S)
