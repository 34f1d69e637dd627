# SPDX-License-Identifier: Apache-2.0
"""vLLM's asynchronous scheduler, which orders as many drafts per step as the budget says.

The worker drafts after a step what the next one will verify, so the scheduler orders drafts one step ahead
(`num_spec_tokens_to_schedule`, from `dynamic_sd_lookup`). A run without drafts verifies none.

A step's duration is the time between its output and the one before, where the device had it waiting by then.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from seer.engine.vllm.draft_link import read_link
from seer.engine.vllm.gpu_drafts.depth import DepthBudget
from seer.engine.vllm.gpu_drafts.graphs import Shapes
from seer.engine.vllm.gpu_drafts.siblings import SIBLINGS, Siblings
from seer.engine.vllm.step_counting import CountingAsyncScheduler
from seer.types import GROUP_DRAFTS, DraftMode, budget_rule

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from seer.engine.vllm.chunk_facts import ChunkFacts

SCHEDULED_S = "seer_scheduled_s"
"""Attribute of a scheduler output: when it was made."""


class GroupedDraftsScheduler(CountingAsyncScheduler):
    """Chooses the number of drafts before each step, and measures what each step took."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.dynamic_sd_lookup is not None, "drafts on the GPU come with a number by batch size"
        additional: Any = self.vllm_config.additional_config
        own = additional["seer"]
        shapes = Shapes(**own["shapes"])
        self._budget = DepthBudget(shapes)
        self._fixed_depth = shapes.depths[-1] if shapes.fixed_tokens is not None else None
        self._orders = {depth: [depth] * len(self.dynamic_sd_lookup) for depth in shapes.depths}
        self._siblings: Siblings | None = None
        link = read_link()
        if link.servers:
            self._siblings = Siblings(link.servers, link.keys, self.max_model_len)
            self._siblings.start()
        self._mode: DraftMode = "none"  # of the run
        self._done_s = 0.0

    def enter(self, request: Request, facts: ChunkFacts | None) -> None:
        """All requests of a run draft in one mode. One that is no chunk of ours changes nothing."""
        super().enter(request, facts)
        if facts is None:
            return
        self._mode = facts.drafts
        if self._siblings is not None and facts.drafts in GROUP_DRAFTS:
            self._siblings.track(request, facts)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Also order the drafts of the step after this one."""
        self.dynamic_sd_lookup = self._orders[self._depth(len(self.running))]
        output = super().schedule(*args, **kwargs)
        setattr(output, SCHEDULED_S, time.monotonic())
        if self._siblings is not None and (tails := self._siblings.take()):
            setattr(output, SIBLINGS, tails)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Also report the step to the budget."""
        done_s, before_s = time.monotonic(), self._done_s
        self._done_s = done_s
        scheduled_s = getattr(scheduler_output, SCHEDULED_S, done_s)
        depth = _uniform_depth(scheduler_output)
        if depth is not None and scheduled_s <= before_s:
            emitted = map(len, model_runner_output.sampled_token_ids) if depth else ()
            self._budget.learn(len(scheduler_output.num_scheduled_tokens), depth, done_s - before_s, emitted)
        return super().update_from_output(scheduler_output, model_runner_output)

    def shutdown(self) -> None:
        """Also stop the exchange with the draft servers."""
        if self._siblings is not None:
            self._siblings.close()
        super().shutdown()

    def _depth(self, num_running: int) -> int:
        if self._mode == "none" or not num_running:
            return 0
        if self._fixed_depth is not None:
            return self._fixed_depth
        return self._budget.choose(num_running, budget_rule(self._mode))


def _uniform_depth(output: SchedulerOutput) -> int | None:
    """The drafts of each request of a step, where all have as many and none computes its context."""
    num_requests = len(output.num_scheduled_tokens)
    width, rest = divmod(output.total_num_scheduled_tokens, max(1, num_requests))
    if rest or not num_requests or output.scheduled_new_reqs:
        return None
    drafts = output.scheduled_spec_decode_tokens
    if width == 1:
        return None if drafts else 0
    is_uniform = len(drafts) == num_requests and all(len(one) == width - 1 for one in drafts.values())
    return width - 1 if is_uniform else None
