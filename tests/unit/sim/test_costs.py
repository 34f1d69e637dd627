# SPDX-License-Identifier: Apache-2.0
"""The cost model against numbers that can be looked up or worked out by hand."""

import pytest

from seer.sim.costs import H200, H800, MODELS, InstanceCost


@pytest.mark.parametrize(
    ("model", "kv_bytes", "gigabytes", "active_billions"),
    [
        ("qwen2-vl-72b", 320 * 1024, 145.4, 71.5),  # the paper: 146 GB with the vision tower
        ("moonlight", 27 * 576 * 2, 32.0, 2.5),  # the paper: 32 GB; 16B parameters
        ("kimi-k2", 61 * 576 * 2, 1026.0, 32.0),  # the paper: 1 TB; 32B active
        ("llama-8b", 128 * 1024, 16.1, 7.5),
    ],
)
def test_models_have_their_published_sizes(model: str, kv_bytes: int, gigabytes: float, active_billions: float) -> None:
    shape = MODELS[model]
    assert shape.kv_bytes_per_token == kv_bytes
    assert shape.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.03)
    assert shape.active_parameters / 1e9 == pytest.approx(active_billions, rel=0.12)


def test_a_small_batch_of_a_dense_model_costs_its_weights_over_the_bandwidth() -> None:
    cost = InstanceCost(model=MODELS["llama-8b"], gpu=H200, overhead_s=0.0)
    step = cost.step(1)
    read = MODELS["llama-8b"].resident_parameters * 2
    assert step.base_s == pytest.approx(read / (H200.bandwidth_bytes_s * 0.85))
    assert cost.step(2).base_s == step.base_s


def test_a_mixture_of_experts_touches_more_weights_as_the_batch_grows() -> None:
    shape = MODELS["moonlight"]
    touched = [shape.touched_bytes(n) for n in (1, 4, 16, 64, 1024)]
    assert touched == sorted(touched)
    assert touched[0] < 0.3 * touched[-1]
    assert touched[-1] == pytest.approx(shape.weight_bytes - 2 * shape.vocabulary * shape.hidden)


def test_a_step_costs_more_with_more_requests_context_or_drafts() -> None:
    cost = InstanceCost(model=MODELS["qwen2-vl-72b"], gpu=H800, num_gpus=8)
    assert cost.step(512).base_s > cost.step(8).base_s
    assert cost.step(512, 4.0).base_s > cost.step(512).base_s
    assert cost.step(8, 1.0, 4096).base_s > cost.step(8).base_s
    assert cost.step(8).per_context_token_s > 0


def test_instances_of_several_gpus_pay_for_communication_and_hold_more() -> None:
    one = InstanceCost(model=MODELS["llama-8b"], gpu=H200)
    two = InstanceCost(model=MODELS["llama-8b"], gpu=H200, num_gpus=2)
    assert one._communication_s(100) == 0
    assert two._communication_s(100) > 0
    assert two.kv_tokens > 2 * one.kv_tokens
    assert two.transfer_s(1000) == pytest.approx(one.transfer_s(1000) / 2)
