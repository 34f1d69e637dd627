# SPDX-License-Identifier: Apache-2.0
"""Adds up vLLM's statistics of each step.

vLLM calls `record` in the event loop's thread, once per step with output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter, StatLoggerBase

from seer.engine.vllm.connector_stats import (
    FAR_BYTES,
    FAR_S,
    LOAD_S,
    LOADED_BYTES,
    OVERLAPPED_LOAD_S,
    UNSAVED_BLOCKS,
)
from seer.engine.vllm.step_counting import BATCHED_TOKENS, DONE_S, EMITTED, PREFILL_TOKENS
from seer.speculation.step_report import StepReport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

StepListener = Callable[[StepReport], None]


@dataclass
class StepCounts:
    """The newest state, and sums since the start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Share of the KV blocks that running requests hold, 0 to 1."""
    num_preemptions: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    draft_host_s: float = 0.0
    """Seconds the engine's process has spent on indexing and drafting."""
    on_step: StepListener | None = field(default=None, repr=False)
    _done_s: float = 0.0  # when the last step that computed anything was done
    _num_preempted: int = 0  # since the last report
    _moved: dict[str, float] = field(default_factory=dict, repr=False)  # since the last report

    def take(self, scheduler: SchedulerStats, iteration: IterationStats | None) -> None:
        """Add one step."""
        was_running = self.num_running
        self.num_running = scheduler.num_running_reqs
        self.num_waiting = scheduler.num_waiting_reqs + getattr(scheduler, "num_skipped_waiting_reqs", 0)
        self.kv_usage = scheduler.kv_cache_usage
        self.num_steps += 1
        drafted = accepted = 0
        stats = scheduler.kv_connector_stats or {}
        own = stats.get("seer")
        if own is not None:
            self.draft_host_s = own["host_s"]
        if scheduler.spec_decoding_stats is not None:
            drafted = scheduler.spec_decoding_stats.num_draft_tokens
            accepted = scheduler.spec_decoding_stats.num_accepted_tokens
            self.num_drafted += drafted
            self.num_accepted += accepted
        if self.on_step is not None:
            for name in (LOADED_BYTES, LOAD_S, OVERLAPPED_LOAD_S, FAR_BYTES, FAR_S, UNSAVED_BLOCKS):
                self._moved[name] = self._moved.get(name, 0.0) + stats.get(name, 0.0)
        if iteration is not None:
            self.num_preemptions += iteration.num_preempted_reqs
            self._num_preempted += iteration.num_preempted_reqs
        done_s = stats.get(DONE_S)
        if done_s is None:
            return  # nothing was computed
        # The start of a step after an idle time is not known here; only consecutive steps are timed.
        if self.on_step is not None and was_running:
            num_preempted, self._num_preempted = self._num_preempted, 0
            moved, self._moved = self._moved, {}
            self.on_step(
                StepReport(
                    duration_s=max(0.0, done_s - self._done_s - moved[LOAD_S]),
                    num_steps=1,
                    num_running=was_running,
                    num_batched_tokens=stats[BATCHED_TOKENS],
                    num_prefill_tokens=stats[PREFILL_TOKENS],
                    mean_context_tokens=0,
                    num_emitted=stats[EMITTED],
                    num_drafted=drafted,
                    num_accepted=accepted,
                    load_s=moved[LOAD_S],
                    overlapped_load_s=moved[OVERLAPPED_LOAD_S],
                    loaded_bytes=int(moved[LOADED_BYTES]),
                    far_load_s=moved[FAR_S],
                    far_loaded_bytes=int(moved[FAR_BYTES]),
                    num_preempted=num_preempted,
                    num_unsaved_blocks=int(moved[UNSAVED_BLOCKS]),
                )
            )
        self._done_s = done_s


def stat_logger(counts: StepCounts) -> Callable[[VllmConfig, int], StatLoggerBase]:
    """A factory for `AsyncLLM(stat_loggers=[...])` that feeds `counts`."""

    class Feed(StatLoggerBase):
        """Passes vLLM's statistics to `counts`."""

        def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
            """The configuration is not needed."""

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
            **_: Any,
        ) -> None:
            """Once per step."""
            if scheduler_stats is not None:
                counts.take(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            """Nothing is logged."""

    return Feed


def attach(llm: AsyncLLM, counts: StepCounts, *, alone: bool) -> None:
    """Feed `counts` from an engine that others have started, with statistics on; `alone`: and nothing else."""
    manager = llm.logger_manager
    assert manager is not None, "the engine was started without statistics"
    ours = PerEngineStatLoggerAdapter(llm.vllm_config, [0], stat_logger(counts))
    manager.stat_loggers[:] = [ours] if alone else [*manager.stat_loggers, ours]
