# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with grouped drafts: after each step they replace what the worker proposed.

Used only with speculation. The methods overridden here have the same signature in vLLM 0.26 to 0.33.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import DraftTokenIds

from seer.engine.vllm.draft_link import read_link
from seer.engine.vllm.step_counting import CountingScheduler
from seer.engine.vllm.step_drafting import StepDrafting

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from seer.engine.vllm.chunk_facts import ChunkFacts

HOST_STATS = "seer"
"""Key of our numbers in `SchedulerStats.kv_connector_stats`, the only field of it that takes any value."""


class SeerScheduler(CountingScheduler):
    """Drafts in the scheduler's process, where requests, groups and batch size are known."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        speculative = self.vllm_config.speculative_config
        assert speculative is not None, "this scheduler is chosen together with a speculative_config"
        additional: Any = self.vllm_config.additional_config
        own = additional["seer"]
        link = read_link()
        self._seer = StepDrafting(
            max_tokens=speculative.num_speculative_tokens,
            max_model_len=self.vllm_config.model_config.max_model_len,
            padding=own["padding"],
            servers=link.servers,
            keys=link.keys,
            fixed_tokens=own["fixed_tokens"],
        )

    def enter(self, request: Request, facts: ChunkFacts | None) -> None:
        """Also track it."""
        super().enter(request, facts)
        if facts is not None:
            self._seer.track(request, facts)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Also note when the step began, and replace placeholders in drafts."""
        self._seer.begin_step()
        output = super().schedule(*args, **kwargs)
        self._seer.fill_placeholders(output.scheduled_spec_decode_tokens)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Also index the tokens that became final."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.num_scheduled_tokens:
            self._seer.end_step(scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Replace the worker's proposals by our drafts."""
        keys = draft_token_ids.req_ids
        super().update_draft_token_ids(DraftTokenIds(keys, self._seer.draft(keys, is_refilled=bool(self.waiting))))

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Also report the time that drafting took in this process."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            own = {"host_s": self._seer.host_s, "num_filled": self._seer.num_filled}
            stats.kv_connector_stats = (stats.kv_connector_stats or {}) | {HOST_STATS: own}
        return stats

    def shutdown(self) -> None:
        """Also stop the draft client."""
        self._seer.close()
        super().shutdown()
