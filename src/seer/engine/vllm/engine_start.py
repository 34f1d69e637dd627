# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM's engine process, without what its front end does that nothing here reads.

Invariants
  1. vLLM's statistics come to our counts once per step, and to nothing that looks at every token.
  2. A process is settled only after its engine has started: until then its variables may change, and its objects grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import enable_envs_cache
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger

from seer.engine.vllm.telemetry import StepCounts, stat_logger

MakeEngine = Callable[[dict[str, Any], StepCounts], AsyncLLM]


def start_engine(arguments: dict[str, Any], counts: StepCounts) -> AsyncLLM:
    """Start an engine process; blocks until it serves."""
    loggers = [stat_logger(counts), _NoPrometheus]
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=loggers)


def settle_process() -> None:
    """Tune a process that serves one engine and nothing else, after its start; vLLM's own processes do the same."""
    enable_envs_cache()  # vLLM reads one of its environment variables with every token
    freeze_gc_heap()  # the collector need not walk vLLM's and PyTorch's objects again


class _NoPrometheus(PrometheusStatLogger):
    """Replaces vLLM's Prometheus logger, which would observe every token for metrics that are not read here."""

    def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
        """No metrics are made."""

    def record(self, *_: Any, **__: Any) -> None:
        """Nothing is recorded."""

    def record_admission_rejection(self, reason: str) -> None:
        """Nothing is recorded."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Nothing is recorded."""

    def log_engine_initialized(self) -> None:
        """Nothing is logged."""
