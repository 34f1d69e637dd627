# SPDX-License-Identifier: Apache-2.0
"""A proposer that proposes nothing, and what is wrong in vLLM's own verification: for drafts made in the scheduler.

Drafts are made in the scheduler (scheduler.py), but vLLM's `custom_class` needs a proposer in the worker. On a CPU its
constructor also replaces a kernel: vLLM 0.22 to 0.32 expands sampling parameters there with a kernel that writes to a
copy, so that drafts of sampled requests are verified under arbitrary temperatures. vLLM's kernel registry is public;
ours writes to the output. tests/unit/engine/test_vllm_kernel.py shows the difference, and
tests/integration/test_vllm_migration.py its effect.

A step without any draft goes through the same verification, of no token. In vLLM 0.32 top-k, where no request has
top-p, then takes the maximum of nothing, and the engine ends. The one function that fails is left out of such steps.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EXPAND_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"
"""The registry's name of the kernel that is replaced."""
VERIFYING, TOP_K = "vllm.v1.sample.rejection_sampler", "apply_top_k_top_p"
"""The module that verifies drafts, and its function for top-k and top-p."""


class StubProposer:
    """Implements vLLM's interface of a `custom_class` proposer."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            from vllm.triton_utils.dispatcher import register_kernels

            register_kernels({EXPAND_KERNEL: expand})
        let_steps_have_no_drafts()

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model."""

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Nothing: the scheduler drafts."""
        return [[] for _ in sampled_token_ids]


def let_steps_have_no_drafts() -> None:
    """Apply top-k and top-p to no token by doing nothing. A vLLM without this function is left as it is."""
    module: Any = importlib.import_module(VERIFYING)
    original = getattr(module, TOP_K, None)
    if original is None or getattr(original, "is_seers", False):
        return

    @functools.wraps(original)
    def to_some(logits: torch.Tensor, *limits: Any, **others: Any) -> torch.Tensor:
        if not logits.shape[0]:
            return logits
        applied: torch.Tensor = original(logits, *limits, **others)
        return applied

    to_some.is_seers = True  # type: ignore[attr-defined]
    setattr(module, TOP_K, to_some)


def expand(  # noqa: PLR0917 - the kernel's own arguments
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803 - the kernel's own name for it
) -> None:
    """Repeat each request's value for each of its draft tokens, replacing one value by another."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    expanded = values.repeat_interleave(counts)
    output[: len(expanded)].copy_(expanded)
