# SPDX-License-Identifier: Apache-2.0
"""What vLLM verifies drafts with on a CPU: what of it is wrong, and our replacements."""

from __future__ import annotations

import importlib
from typing import Any

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
    """Why no placeholder may reach it: see invariant 5 of step_drafting.py."""
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


def verifying(monkeypatch: pytest.MonkeyPatch) -> Any:
    from seer.engine.vllm.proposer import TOP_K, VERIFYING

    module: Any = importlib.import_module(VERIFYING)
    monkeypatch.setattr(module, TOP_K, getattr(module, TOP_K))  # put back afterwards
    return module


NOTHING = torch.empty(0, 16), torch.empty(0, dtype=torch.int32)


def test_upstream_still_cannot_apply_top_k_to_a_step_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, top_k = NOTHING
    with pytest.raises(RuntimeError, match="numel"):
        verifying(monkeypatch).apply_top_k_top_p(logits, top_k, None)


def test_a_step_without_drafts_applies_nothing_and_others_what_vllm_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    from seer.engine.vllm.proposer import let_steps_have_no_drafts

    module = verifying(monkeypatch)
    original = module.apply_top_k_top_p
    let_steps_have_no_drafts()
    replaced = module.apply_top_k_top_p
    let_steps_have_no_drafts()
    assert module.apply_top_k_top_p is replaced, "a second engine of this process replaces nothing again"
    logits, top_k = NOTHING
    assert replaced(logits, top_k, None) is logits
    some = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    limits = torch.tensor([1, 4, 16], dtype=torch.int32), torch.tensor([0.5, 0.9, 1.0])
    for k, p in ((limits[0], None), (None, limits[1]), limits):
        assert torch.equal(replaced(some.clone(), k, p), original(some.clone(), k, p))


def test_a_vllm_without_that_function_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from seer.engine.vllm.proposer import let_steps_have_no_drafts

    module = verifying(monkeypatch)
    monkeypatch.delattr(module, "apply_top_k_top_p")
    let_steps_have_no_drafts()
    assert not hasattr(module, "apply_top_k_top_p")
