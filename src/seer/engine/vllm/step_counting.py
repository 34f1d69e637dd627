# SPDX-License-Identifier: Apache-2.0
"""What each step of vLLM computed and when it was done, counted by the scheduler; and log-probabilities that were
not asked for, checked and left out here.

vLLM's own statistics count a whole context when its first token is sampled, cached parts included, leave out what a
preempted request computes again, and are timed when the front end reads them. The scheduler knows the batched tokens
of every step and when its output arrived. Its counts go to our stat logger (telemetry.py) with vLLM's statistics.

Log-probabilities are computed for every request, because a token without one shows that the logits are NaN, infinite
or all excluded. Computing them costs less than counting NaN in the logits, which is vLLM's own way; carrying them to
the front end is what costs. So where a request does not want them, they are checked in this process and left out.

The methods overridden here have the same signature in vLLM 0.26 to 0.33.

Invariants
  1. A log-probability that is not finite is never left out: the front end refuses its token.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from seer.engine.vllm.leased_scheduler import LeasedScheduler
from seer.engine.vllm.output_holding import OutputHolding

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from seer.engine.vllm.chunk_facts import ChunkFacts

BATCHED_TOKENS, PREFILL_TOKENS = "seer_batched_tokens", "seer_prefill_tokens"
"""Tokens the step computed; of them, prefill: context tokens except the last one of each request, from which a token is
sampled."""
EMITTED = "seer_emitted"
"""Tokens the step added to responses; vLLM counts only those it has sent."""
DONE_S = "seer_done_s"
"""When the step's output arrived in the scheduler: two of these bound a step, however late they are read."""


def count_batched_tokens(output: SchedulerOutput) -> dict[str, int]:
    """The batched tokens of one step, and how many of them are prefill."""
    num_batched_tokens = output.total_num_scheduled_tokens
    num_drafted = sum(map(len, output.scheduled_spec_decode_tokens.values()))
    num_prefill_tokens = num_batched_tokens - num_drafted - len(output.num_scheduled_tokens)
    return {BATCHED_TOKENS: num_batched_tokens, PREFILL_TOKENS: num_prefill_tokens}


class CountingScheduler(LeasedScheduler):
    """vLLM's scheduler, which also counts its steps and holds outputs back until they are due."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._holding = OutputHolding(self.scheduler_config.stream_interval)
        self._without_logprobs: set[str] = set()

    def enter(self, request: Request, facts: ChunkFacts | None) -> None:
        """Also note whether it wants log-probabilities."""
        super().enter(request, facts)
        if facts is not None and not facts.logprobs:
            self._without_logprobs.add(request.request_id)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Also count the step, leave out log-probabilities, and hold back outputs that are not due."""
        done_s = time.monotonic()
        clients = super().update_from_output(scheduler_output, model_runner_output)
        num_emitted = 0
        if self._without_logprobs and _all_finite(model_runner_output):
            self._leave_out_logprobs(clients)
        for client in clients.values():
            num_emitted += sum(len(output.new_token_ids) for output in client.outputs)
            client.outputs = self._holding.pass_on(client.outputs)
        self._holding.drop(scheduler_output.finished_req_ids)
        self._without_logprobs -= scheduler_output.finished_req_ids
        if scheduler_output.total_num_scheduled_tokens:
            counted = count_batched_tokens(scheduler_output) | {EMITTED: num_emitted, DONE_S: done_s}
            for client in clients.values():
                stats = client.scheduler_stats
                if stats is not None:  # only one client gets statistics; this is the only field that takes any value
                    stats.kv_connector_stats = (stats.kv_connector_stats or {}) | counted
        return clients

    def _leave_out_logprobs(self, clients: dict[int, EngineCoreOutputs]) -> None:
        for client in clients.values():
            for output in client.outputs:
                if output.request_id in self._without_logprobs:
                    output.new_logprobs = None


def _all_finite(output: ModelRunnerOutput) -> bool:
    """Whether every token of a step has a probability."""
    return output.logprobs is None or bool(np.isfinite(output.logprobs.logprobs).all())


class CountingAsyncScheduler(CountingScheduler, AsyncScheduler):
    """`CountingScheduler` for asynchronous scheduling."""


def counting_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> CountingScheduler:
    """For `scheduler_cls`: a function, because vLLM decides on asynchronous scheduling after the class was named."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (CountingAsyncScheduler if is_async else CountingScheduler)(vllm_config=vllm_config, **kwargs)
