"""The kernel that expands sampling parameters on a CPU: upstream's writes its answer to a copy, ours does not."""

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
