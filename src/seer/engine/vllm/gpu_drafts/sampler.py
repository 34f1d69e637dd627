# SPDX-License-Identifier: Apache-2.0
"""Verifies drafts so that the same seed gives the tokens plain vLLM would give.

Every position is sampled with the noise of (seed, absolute position), as without drafts, and a draft is accepted while
it equals the sample in its place. A point-mass draft is accepted with the same probability as under rejection sampling,
and a seeded response does not depend on drafts, up to rounding of logits in batches of another shape.

One function of vLLM is replaced, `rejection_sample`: what comes before it (penalties, top-k, temperature) and after it
(log-probabilities) is vLLM's, and its arguments have been the same since 0.26.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch

from seer.engine.vllm.gpu_drafts.kernels import accept_kernel, power_of_2

VERIFYING = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
"""The module whose `rejection_sample` is replaced."""


def couple() -> None:
    """Verify this process's drafts by sampling."""
    module: Any = importlib.import_module(VERIFYING)
    if not getattr(module.rejection_sample, "is_seers", False):
        module.rejection_sample = coupled(module.rejection_sample)


def coupled(original: Any) -> Any:
    """vLLM's `rejection_sample` with its acceptance replaced.

    Falls back to vLLM's own where drafts carry probabilities, or tokens are to be chosen in yet another way.
    """
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    # From 0.29 on: the noise of the target model, which is not that of a draft model.
    has_drafting = "is_drafting" in inspect.signature(gumbel_sample).parameters
    as_plain: dict[str, Any] = {"is_drafting": False} if has_drafting else {}

    @functools.wraps(original)  # a later engine of this process looks at its arguments again
    def rejection_sample(  # noqa: PLR0917 - vLLM's own arguments
        target_logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        cu_num_logits: torch.Tensor,
        pos: torch.Tensor,
        idx_mapping: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        num_speculative_steps: int,
        synthetic_conditional_rates: torch.Tensor | None = None,
        use_fp64: bool = False,
        use_block_verification: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if (
            draft_logits is not None
            or synthetic_conditional_rates is not None
            or use_block_verification
            or others.get("contexts") is not None  # watermarks
            or others.get("fly_window_size")  # accepts what differs
        ):
            result: tuple[torch.Tensor, torch.Tensor] = original(
                target_logits,
                draft_logits,
                draft_sampled,
                cu_num_logits,
                pos,
                idx_mapping,
                expanded_idx_mapping,
                expanded_local_pos,
                temperature,
                seed,
                num_speculative_steps,
                synthetic_conditional_rates,
                use_fp64=use_fp64,
                use_block_verification=use_block_verification,
                **others,
            )
            return result
        sampled = gumbel_sample(
            target_logits,
            expanded_idx_mapping,
            temperature,
            seed,
            pos,
            apply_temperature=False,
            use_fp64=use_fp64,
            **as_plain,
        )
        num_reqs = cu_num_logits.shape[0] - 1
        width = num_speculative_steps + 1
        accepted = sampled.new_zeros(num_reqs, width, dtype=torch.int64)
        num_accepted = torch.empty(num_reqs, dtype=torch.int32, device=target_logits.device)
        accept_kernel[(num_reqs,)](
            sampled,
            draft_sampled,
            cu_num_logits,
            accepted,
            accepted.stride(0),
            num_accepted,
            WIDTH=power_of_2(width),
            num_warps=1,
        )
        return accepted, num_accepted

    rejection_sample.is_seers = True  # type: ignore[attr-defined]
    return rejection_sample
