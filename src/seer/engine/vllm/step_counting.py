"""What a step of vLLM computed and when it was done, counted by the scheduler that ordered it.

vLLM's own numbers count a context as a whole when its first token is sampled, cached parts included, say nothing of
what
a preempted request computes again, and reach the front end when it has time to listen. The scheduler knows the rows of
every step and is told the moment its output is there; the counts travel with vLLM's statistics of the step to our stat
logger (telemetry.py).

Everything else is vLLM's own; what is overridden here has the same signature from 0.26 to 0.32.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from seer.engine.vllm.output_holding import OutputHolding

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

BATCHED_TOKENS, PREFILL_TOKENS = "seer_batched_tokens", "seer_prefill_tokens"
"""Tokens the step computed; of them, those that only fill KV memory: parts of contexts, but for the row a token is
sampled from."""
EMITTED = "seer_emitted"
"""Tokens the step added to responses; vLLM's own count is of what has been sent."""
DONE_S = "seer_done_s"
"""When the step's output was there: what lies between two of these is a step, however late it is heard of."""


def count_batched_tokens(output: SchedulerOutput) -> dict[str, int]:
    """The rows of one step."""
    num_batched_tokens = output.total_num_scheduled_tokens
    num_drafted = sum(map(len, output.scheduled_spec_decode_tokens.values()))
    return {
        BATCHED_TOKENS: num_batched_tokens,
        PREFILL_TOKENS: num_batched_tokens - num_drafted - len(output.num_scheduled_tokens),
    }


class CountingScheduler(Scheduler):
    """vLLM's scheduler, which also counts, and sends what it has when it is due."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._holding = OutputHolding(self.scheduler_config.stream_interval)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Also count, and hold back what is not due."""
        done_s = time.monotonic()
        clients = super().update_from_output(scheduler_output, model_runner_output)
        num_emitted = 0
        for client in clients.values():
            num_emitted += sum(len(output.new_token_ids) for output in client.outputs)
            client.outputs = self._holding.pass_on(client.outputs)
        self._holding.drop(scheduler_output.finished_req_ids)
        if scheduler_output.total_num_scheduled_tokens:
            counted = count_batched_tokens(scheduler_output) | {EMITTED: num_emitted, DONE_S: done_s}
            for client in clients.values():
                stats = client.scheduler_stats
                if stats is not None:  # in one of them; in the one field that takes anything
                    stats.kv_connector_stats = (stats.kv_connector_stats or {}) | counted
        return clients


class CountingAsyncScheduler(CountingScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""


def counting_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> CountingScheduler:
    """For `scheduler_cls`, in the place of a class: vLLM settles on asynchronous scheduling after we have named one."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (CountingAsyncScheduler if is_async else CountingScheduler)(vllm_config=vllm_config, **kwargs)
