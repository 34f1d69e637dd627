# SPDX-License-Identifier: Apache-2.0
"""Verifies drafts so that the same seed gives the tokens plain vLLM would give.

Every position is sampled with the noise of (seed, absolute position), as without drafts, and a draft is accepted while
it equals the sample in its place. A point-mass draft is accepted with the same probability as under rejection sampling,
and a seeded response does not depend on drafts, up to rounding of logits in batches of another shape.
"""

from __future__ import annotations

from typing import Any

import torch

from seer.engine.vllm.gpu_drafts.kernels import accept_kernel, power_of_2


def coupled(rejection_sampler: Any) -> Any:
    """vLLM's rejection sampler with its acceptance replaced."""
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    class CoupledSampler(type(rejection_sampler)):  # type: ignore[misc]
        """Falls back to vLLM's own way where drafts carry probabilities, or logits are checked."""

        def __init__(self) -> None:
            self.__dict__.update(rejection_sampler.__dict__)

        def __call__(self, logits: torch.Tensor, input_batch: Any, draft_logits: Any = None, *rest: Any) -> Any:
            sampler = self.sampler
            if (
                draft_logits is not None
                or any(one is not None for one in rest)
                or self.synthetic_conditional_rates is not None
                or sampler.compute_nans
            ):
                return rejection_sampler(logits, input_batch, draft_logits, *rest)
            inputs = input_batch.input_ids[input_batch.logits_indices]
            sampled, processed = sampler.sample(
                logits,
                input_batch.expanded_idx_mapping,
                input_batch.idx_mapping_np,
                input_batch.positions[input_batch.logits_indices],
                inputs,
                input_batch.expanded_local_pos,
                return_logprobs=sampler.returns_logprobs(input_batch.idx_mapping_np),
            )
            num_reqs = input_batch.cu_num_logits.shape[0] - 1
            width = self.num_speculative_steps + 1
            accepted = sampled.new_zeros(num_reqs, width, dtype=torch.int64)
            num_accepted = torch.empty(num_reqs, dtype=torch.int32, device=logits.device)
            accept_kernel[(num_reqs,)](
                sampled,
                inputs,
                input_batch.cu_num_logits,
                accepted,
                accepted.stride(0),
                num_accepted,
                WIDTH=power_of_2(width),
                num_warps=1,
            )
            is_processed = sampler.logprobs_mode in ("processed_logprobs", "processed_logits")
            logprobs = self._get_logprobs_tensors(
                input_batch, accepted, num_accepted, processed if is_processed else logits
            )
            num_sampled, num_rejected = get_num_sampled_and_rejected(
                num_accepted,
                input_batch.seq_lens,
                input_batch.cu_num_logits,
                input_batch.idx_mapping,
                sampler.req_states.prefill_len.gpu,
            )
            return SamplerOutput(
                sampled_token_ids=accepted,
                logprobs_tensors=logprobs,
                num_nans=None,
                num_sampled=num_sampled,
                num_rejected=num_rejected,
            )

    return CoupledSampler()
