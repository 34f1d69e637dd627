# SPDX-License-Identifier: Apache-2.0
"""vLLM's asynchronous scheduler, which schedules drafts only in runs that want them.

A worker with grouped drafts on the GPU verifies as many as the scheduler orders, by the number of running requests
(`num_speculative_tokens_per_batch_size`). A run without drafts must not verify any: its requests are not stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seer.engine.vllm.chunks import EXTRA
from seer.engine.vllm.step_counting import CountingAsyncScheduler

if TYPE_CHECKING:
    from vllm.v1.request import Request


class GroupedDraftsScheduler(CountingAsyncScheduler):
    """Sets the number of drafts by batch size to zero while the newest request is of a run without drafts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.dynamic_sd_lookup is not None, "drafts on the GPU come with a number by batch size"
        self._with_drafts = self.dynamic_sd_lookup
        self._without_drafts = [0] * len(self._with_drafts)

    def add_request(self, request: Request) -> None:
        """All requests of a run want drafts, or none does."""
        params = request.sampling_params
        facts = (params.extra_args or {}).get(EXTRA) if params is not None else None
        wants = facts is not None and facts["drafts"] != "none"
        self.dynamic_sd_lookup = self._with_drafts if wants else self._without_drafts
        super().add_request(request)
