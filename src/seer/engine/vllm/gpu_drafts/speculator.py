# SPDX-License-Identifier: Apache-2.0
"""What vLLM's runner calls in the place of a draft model: it drafts from the groups' tokens, on the device.

vLLM calls `propose` after every step, when the new tokens are in its request states. Which requests run, and how many
drafts the next step will verify, is read from the scheduler's output when the step begins.

Invariants
  1. `propose` never waits for the device and moves nothing to the host.
  2. Every token that became final is learned before its row is given to another request, and none of a request that
     does not draft.
  3. A step after which nothing is drafted costs nothing but, every LEARN_EVERY_STEPS, one small kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from seer.engine.vllm.chunk_facts import read_facts
from seer.engine.vllm.gpu_drafts.siblings import SIBLINGS
from seer.engine.vllm.gpu_drafts.store import ARENA_TOKENS, TABLE_ENTRIES, GroupStore, NewRow

LEARN_EVERY_STEPS = 32
"""Where steps do not draft: seldom enough to cost nothing, often enough that siblings know each other's tokens when
drafting begins again."""
SPARE_TOKENS = 16
"""Beyond a sequence's limit: an asynchronous step may write a few tokens past a stop."""


class GroupedSpeculator(BaseSpeculator):
    """Point-mass drafts from the tokens of a request's group; made in the place of vLLM's `init_speculator`."""

    supports_mm_inputs = False
    draft_logits = None
    enable_adaptive_verification = False

    def __init__(self, vllm_config: Any, device: torch.device, *_: Any, **__: Any) -> None:
        self.model = torch.nn.Module()  # vLLM 0.26 prepares communication buffers of `speculator.model`
        own = (vllm_config.additional_config or {}).get("seer", {})
        self.num_draft_tokens = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        self.store = GroupStore(
            vllm_config.scheduler_config.max_num_seqs,
            self.num_draft_tokens,
            device,
            arena_tokens=own.get("arena_tokens") or ARENA_TOKENS,
            table_entries=own.get("table_entries") or TABLE_ENTRIES,
        )
        self._device = device
        self._states: Any = None
        self._run: Any = None
        self._next_drafts = self.num_draft_tokens
        self._unlearned_steps = 0

    def bind(self, runner: Any) -> None:
        """See every step of the runner begin."""
        self._states = runner.req_states
        finish_requests, add_requests = runner.finish_requests, runner.add_requests

        def finish_first(scheduler_output: Any) -> None:
            names = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
            self._finish(names)
            finish_requests(scheduler_output)

        def add_then(scheduler_output: Any) -> None:
            add_requests(scheduler_output)
            self._next_drafts = scheduler_output.num_spec_tokens_to_schedule
            self._start(scheduler_output.scheduled_new_reqs)
            self.store.receive(getattr(scheduler_output, SIBLINGS, ()))

        runner.finish_requests, runner.add_requests = finish_first, add_then

    def _finish(self, names: Iterable[str]) -> None:
        index = self._states.req_id_to_index
        rows = [index[name] for name in names if name in index]
        if rows and self._unlearned_steps:
            self._learn(torch.tensor(rows, dtype=torch.int32).to(self._device, non_blocking=True))
        self.store.finish(rows)

    def _start(self, new_requests: Iterable[Any]) -> None:
        rows: list[NewRow] = []
        without_drafts: list[int] = []
        for one in new_requests:
            known = len(one.prefill_token_ids)
            facts = read_facts(one.sampling_params, known, name=one.req_id)
            if facts is None or facts.drafts == "none":
                without_drafts.append(self._states.req_id_to_index[one.req_id])
                continue
            self._begin_run((facts.run, facts.weights_version))
            self.store.end(facts.ended_groups)
            group = facts.group if facts.drafts != "own" else ("own", facts.request)
            limit = min(len(one.prompt_token_ids) + facts.max_left, self.max_model_len) + SPARE_TOKENS
            row = self._states.req_id_to_index[one.req_id]
            rows.append(NewRow(row, group, facts.request, facts.num_prompt_tokens, max(limit, known)))
        self.store.ignore(without_drafts)
        self.store.start(rows)

    def _begin_run(self, run: Any) -> None:
        if run != self._run:
            self._run = run
            self.store.reset()

    def _learn(self, rows: torch.Tensor) -> None:
        self.store.learn(rows, self._states.all_token_ids.gpu, self._states.total_len.gpu)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing of ours is captured."""

    def capture(self) -> None:
        """Nothing of ours is captured."""

    def prepare_watermarking(self, *args: Any, **kwargs: Any) -> None:
        """Newer versions ask every speculator."""

    @torch.inference_mode()
    def propose(  # noqa: PLR0917 - vLLM's own arguments
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Drafts of the next step, [requests, K]."""
        if dummy_run or self._states is None:
            return self.store.drafts[: input_batch.num_reqs]
        rows = input_batch.idx_mapping
        if not self._next_drafts:
            self._unlearned_steps += 1
            if self._unlearned_steps >= LEARN_EVERY_STEPS:
                self._unlearned_steps = 0
                self._learn(rows)
            return self.store.drafts[: input_batch.num_reqs]
        self._unlearned_steps = 0
        self._learn(rows)
        states = self._states
        return self.store.draft(rows, num_sampled, last_sampled, states.all_token_ids.gpu, states.total_len.gpu)
