# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step goes in the process of vLLM's engine; a scheduler for `--engine` of gpu_drafts.py.

    python benchmarks/vllm/gpu_drafts.py ... --engine '{"scheduler_cls": "phase_timer.timed"}'

This folder must be on PYTHONPATH. After every REPORT_STEPS steps a line in the engine's log has milliseconds of a step
by phase: schedule, launch of the model, sample and draft, wait for the device, update. With the worker in a process of
its own (`mp`) launch and sample are the messages to it.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

REPORT_STEPS = 400
spent_s: Counter[str] = Counter()
calls: Counter[str] = Counter()


def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its time added to a phase."""

    def run(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent_s[name] += time.perf_counter() - began_s
            calls[name] += 1

    return run


def patch(owner: Any, method: str, name: str) -> None:
    if hasattr(owner, method):
        setattr(owner, method, clocked(name, getattr(owner, method)))


def patch_worker() -> None:
    """Parts of the worker; only where it lives in this process."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from seer.engine.vllm.gpu_drafts.speculator import GroupedSpeculator

    patch(GroupedSpeculator, "propose", "of sample: propose")
    patch(GPUModelRunner, "sample", "of sample: sampler")
    patch(GPUModelRunner, "postprocess_sampled", "of sample: postprocess")
    patch(GPUModelRunner, "prepare_inputs", "of launch: inputs")


def timed(vllm_config: Any, **kwargs: Any) -> Any:
    """For `scheduler_cls`: the scheduler that the engine would have, timed."""
    from vllm.v1.executor import uniproc_executor
    from vllm.v1.executor.multiproc_executor import FutureWrapper, MultiprocExecutor

    from seer.engine.vllm.gpu_drafts.scheduler import GroupedDraftsScheduler
    from seer.engine.vllm.step_counting import CountingAsyncScheduler

    drafts = vllm_config.speculative_config is not None
    scheduler = (GroupedDraftsScheduler if drafts else CountingAsyncScheduler)(vllm_config=vllm_config, **kwargs)
    for executor in (uniproc_executor.UniProcExecutor, MultiprocExecutor):
        patch(executor, "execute_model", "launch")
        patch(executor, "sample_tokens", "sample")
    patch(uniproc_executor.AsyncOutputFuture, "result", "wait")
    patch(FutureWrapper, "result", "wait")
    patch_worker()
    scheduler.schedule = clocked("schedule", scheduler.schedule)
    update, began_s = clocked("update", scheduler.update_from_output), [time.perf_counter()]

    def update_and_report(output: Any, result: Any) -> Any:
        found = update(output, result)
        calls["requests"] += len(output.num_scheduled_tokens)
        if calls["update"] >= REPORT_STEPS:
            now_s, steps = time.perf_counter(), calls["update"]
            phases = ", ".join(f"{name} {1e3 * s / steps:.2f}" for name, s in sorted(spent_s.items()))
            whole_ms = 1e3 * (now_s - began_s[0]) / steps
            sys.stderr.write(f"PHASES {calls['requests'] / steps:.0f} requests: {whole_ms:.2f} ms a step: {phases}\n")
            sys.stderr.flush()
            spent_s.clear()
            calls.clear()
            began_s[0] = now_s
        return found

    scheduler.update_from_output = update_and_report
    return scheduler
