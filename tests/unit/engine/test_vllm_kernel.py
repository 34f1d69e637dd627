# SPDX-License-Identifier: Apache-2.0
"""vLLM's kernels that verify drafts on a CPU: which of them are wrong, and our replacement."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from vllm_engines import needs_vllm

pytestmark = needs_vllm

TEMPERATURES = torch.tensor([0.5, 0.0, 1.5])
DRAFTS_UP_TO = torch.tensor([2, 3, 5], dtype=torch.int32)
EXPANDED = [0.5, 0.5, 1.0, 1.5, 1.5]


def test_our_kernel_repeats_each_value_for_each_draft_and_replaces_greedy() -> None:
    from seer.engine.vllm.proposer import expand

    output = torch.full((5,), -7.0)
    expand(output, TEMPERATURES, DRAFTS_UP_TO, 0, 1)
    assert output.tolist() == EXPANDED
    top_k = torch.full((5,), -7, dtype=torch.int32)
    expand(top_k, torch.tensor([4, 0, 9], dtype=torch.int32), DRAFTS_UP_TO, 0, 0)
    assert top_k.tolist() == [4, 4, 0, 9, 9]


def test_upstream_still_needs_replacing() -> None:
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils

    current_platform.import_kernels()
    output = torch.full((5,), -7.0)
    cpu_triton_utils._expand_kernel_impl(output, TEMPERATURES, DRAFTS_UP_TO, 0, 1)
    assert output.tolist() != EXPANDED, "upstream is right now: drop our kernel for these versions"


def test_upstream_still_takes_placeholders_for_tokens() -> None:
    """Why no placeholder may reach it: see invariant 4 of step_drafting.py."""
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils

    current_platform.import_kernels()
    recovered, bonus, placeholder = 50, 100, -1
    shares = torch.tensor([[0.1, 0.9], [0.1, 0.9], [0.1, 0.9]])
    drafts = torch.tensor([0, placeholder, placeholder], dtype=torch.int32)  # of two requests
    output = torch.full((2, 3), -1, dtype=torch.int32)
    cpu_triton_utils._rejection_random_sample_kernel_impl(
        output,
        torch.tensor([1, 3], dtype=torch.int32),
        drafts,
        None,
        shares,
        torch.full((2, 1), bonus),
        torch.full((3,), recovered, dtype=torch.int32),
        torch.full((3,), 0.5, dtype=torch.float64),
        torch.zeros(2, dtype=torch.bool),
        2,
        shares.shape[1],
        NO_DRAFT_PROBS=True,
    )
    assert output[1].tolist() != [recovered, -1, -1], "upstream is right now: placeholders may stay in these versions"
