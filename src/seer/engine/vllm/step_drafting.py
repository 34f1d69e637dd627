# SPDX-License-Identifier: Apache-2.0
"""Drafts for the requests of one engine, step by step: index final tokens, ask the budget, draft.

Synchronous, and called by the scheduler (scheduler.py) only. vLLM verifies one linear draft per request, so only the
likeliest path is drafted.

Invariants
  1. Only final tokens are indexed, each once per chunk.
  2. A draft never reaches past the end of its chunk or of the context.
  3. How much is drafted is `MeasuredBudget`'s decision, unless `fixed_tokens` is set.
  4. A draft ends before `min_tokens` does. vLLM's older runner keeps stop tokens from the token after a draft while the
     response was shorter than `min_tokens` before it, though it is long enough there.
  5. Only real tokens are sent to be verified. vLLM expects its placeholders to be rejected, but its kernel for a CPU
     (0.32) looks up their probability at index -1, which belongs to another token, and accepts some of them. The next
     token would then be sampled, and its log-probability computed, after tokens that the response does not have.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seer.config.engines import Padding
from seer.drafting.base import Allowance, RunningBatch
from seer.drafting.curve_keys import ClientKeys
from seer.drafting.grouped_drafter import GroupedDrafter, LinearAsk
from seer.drafting.live_budget import MeasuredBudget
from seer.speculation.step_report import StepReport
from seer.speculation.throughput import DraftLimits
from seer.types import DraftMode

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from seer.engine.vllm.chunk_facts import ChunkFacts

FILLER_TOKEN = 0
"""Pads drafts. Verified like any token, so it is accepted only where the model samples it."""
PLACEHOLDER = -1
"""vLLM's own filler, which is no token: a request that arrives with one token left to compute gets them."""


@dataclass(slots=True)
class _TrackedRequest:
    request: Request
    group: int
    id: int
    is_probe: bool
    num_prompt_tokens: int
    num_known: int


class StepDrafting:
    """Drafting for the scheduler of one engine."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_model_len: int,
        padding: Padding,
        servers: Sequence[str],
        fixed_tokens: int | None,
        keys: ClientKeys | None = None,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._padding = padding
        self._fixed_tokens = fixed_tokens
        self._drafter = GroupedDrafter(tuple(servers), keys)
        self._budget = self._new_budget()
        self._tracked: dict[str, _TrackedRequest] = {}
        self._run: tuple[str, str, int] | None = None
        self._began_s = 0.0
        self.host_s = 0.0
        """Seconds that indexing and drafting have taken so far."""
        self.num_filled = 0
        """Filler tokens in drafts so far."""

    def track(self, request: Request, facts: ChunkFacts) -> None:
        """A chunk arrived: index its response so far."""
        began_s = time.perf_counter()
        self._begin_run(facts.run, facts.drafts, facts.weights_version)
        for ended in facts.ended_groups:
            self._drafter.drop(ended)
        self._forget_aborted()
        prompt = facts.num_prompt_tokens
        names = facts.group, facts.request, facts.is_probe
        tracked = _TrackedRequest(request, *names, prompt, request.num_tokens)
        self._tracked[request.request_id] = tracked
        self._drafter.register(tracked.group, tracked.id, request.all_token_ids[:prompt])
        if request.num_tokens > prompt:
            tokens = request.all_token_ids[prompt : request.num_tokens]
            self._drafter.observe(tracked.group, tracked.id, tokens, start=0)
        self.host_s += time.perf_counter() - began_s

    def _forget_aborted(self) -> None:
        """Those that ended otherwise than by a step's tokens; `end_step` sees the others leave."""
        for key, one in list(self._tracked.items()):
            if one.request.is_finished():
                self._drafter.forget(one.id)
                del self._tracked[key]

    def begin_step(self) -> None:
        """A step is about to be scheduled."""
        self._began_s = time.perf_counter()

    def fill_placeholders(self, drafts: dict[str, list[int]]) -> None:
        """The step was scheduled: replace vLLM's placeholders by filler tokens."""
        for draft in drafts.values():
            if PLACEHOLDER in draft:
                self.num_filled += draft.count(PLACEHOLDER)
                draft[:] = [FILLER_TOKEN if token == PLACEHOLDER else token for token in draft]

    def end_step(self, scheduled: dict[str, int], num_drafted: dict[str, list[int]]) -> None:
        """A step was computed: index its tokens, and report its cost to the budget."""
        began_s = time.perf_counter()
        num_emitting = num_emitted = num_prefill = 0
        for key, num_scheduled in scheduled.items():
            one = self._tracked.get(key)
            if one is None:
                continue
            if num_scheduled > 1 + len(num_drafted.get(key, ())):
                num_prefill += num_scheduled
            num_tokens = one.request.num_tokens
            if num_tokens > one.num_known:
                tokens = one.request.all_token_ids[one.num_known : num_tokens]
                self._drafter.observe(one.group, one.id, tokens, start=one.num_known - one.num_prompt_tokens)
                num_emitting += 1
                num_emitted += num_tokens - one.num_known
                one.num_known = num_tokens
            if one.request.is_finished():
                self._drafter.forget(one.id)
                del self._tracked[key]
        drafted = sum(map(len, num_drafted.values()))
        now_s = time.perf_counter()
        self._budget.on_step(
            StepReport(
                duration_s=now_s - self._began_s,
                num_steps=1,
                num_running=len(scheduled),
                num_batched_tokens=sum(scheduled.values()),
                num_prefill_tokens=num_prefill,
                mean_context_tokens=0,
                num_emitted=num_emitted,
                num_drafted=drafted,
                num_accepted=max(0, num_emitted - num_emitting),
            )
        )
        self.host_s += now_s - began_s

    def draft(self, keys: Sequence[str], *, is_refilled: bool = True) -> list[list[int]]:
        """The drafts of the next step, one per request; empty where nothing is drafted. See `RunningBatch`."""
        began_s = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in keys]
        indices, asks = [], []
        # Requests that ended are no longer tracked, and those that still compute their context do not draft.
        decoding = {
            index: one
            for index, one in enumerate(map(self._tracked.get, keys))
            if one is not None and one.request.num_computed_tokens >= one.request.num_tokens - 1
        }
        allowance = self._allowance(decoding, is_refilled)
        for index, one in decoding.items():
            most = min(allowance.tokens_for(one.is_probe), self._room(one))
            if most > 0:
                indices.append(index)
                asks.append(LinearAsk(one.group, one.id, most))
        if asks:
            for index, draft in zip(indices, self._drafter.draft_linear(asks), strict=True):
                drafts[index] = draft
        self._pad(drafts, decoding)
        self.host_s += time.perf_counter() - began_s
        return drafts

    def _room(self, one: _TrackedRequest) -> int:
        """Most draft tokens that the request can still use; the step itself samples one more."""
        request = one.request
        left = (request.max_tokens or 0) - request.num_output_tokens - 1
        assert request.sampling_params is not None, "a chunk generates"
        num_without_stop = request.sampling_params.min_tokens - request.num_output_tokens
        if num_without_stop > 0:
            left = min(left, num_without_stop - 1)
        return min(left, self._max_model_len - request.num_tokens - 1, self._max_tokens)

    def _allowance(self, decoding: Mapping[int, _TrackedRequest], is_refilled: bool) -> Allowance:
        if self._drafter.mode == "none" or not decoding:
            return Allowance(0)
        if self._fixed_tokens is not None:
            return Allowance(min(self._fixed_tokens, self._max_tokens))
        num_probes = sum(one.is_probe for one in decoding.values())
        return self._budget(RunningBatch(len(decoding), num_probes, is_refilled)).cut(self._max_tokens)

    def _pad(self, drafts: list[list[int]], decoding: Mapping[int, _TrackedRequest]) -> None:
        """Give every decoding request K draft tokens, so that vLLM's full CUDA graph for 1 + K tokens applies."""
        if self._padding == "none" or (self._padding == "drafted" and not any(drafts)):
            return
        longest = max((one.request.num_tokens for one in decoding.values()), default=0)
        if longest + self._max_tokens >= self._max_model_len:
            return  # one request that cannot be padded makes padding the others useless
        for index in decoding:
            missing = self._max_tokens - len(drafts[index])
            drafts[index].extend([FILLER_TOKEN] * missing)
            self.num_filled += missing

    def _begin_run(self, run: str, mode: DraftMode, weights_version: int) -> None:
        if self._run != (run, mode, weights_version):
            self._run = (run, mode, weights_version)
            self._drafter.begin_run(run, mode, weights_version)
            self._budget = self._new_budget()

    def _new_budget(self) -> MeasuredBudget:
        is_padded = self._padding != "none"
        choices = (0, self._max_tokens) if is_padded else range(self._max_tokens + 1)
        return MeasuredBudget(self._drafter, DraftLimits(tuple(choices), is_uniform=is_padded))

    def close(self) -> None:
        """Stop the draft client."""
        self._drafter.close()
