# SPDX-License-Identifier: Apache-2.0
"""The memory plan says what a rollout takes, and the rollout takes what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from safetensors.torch import load_file

from seer.config import KvConfig, PoolConfig, RolloutConfig, plain_values
from seer.engine import prepare as prepare_module
from seer.engine.instance_settings import InstanceSettings
from seer.engine.local.hosted import make_local
from seer.engine.local.tiny import make_tiny_model
from seer.engine.prepare import PreparedEngine, prepare
from seer.hosting import devices, memory_plan
from seer.metrics.events import discard

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def prepared(model: Path, **settings: Any) -> PreparedEngine:
    return prepare(RolloutConfig(model=str(model), **settings))


def see_gpus(monkeypatch: pytest.MonkeyPatch, number: int, free_bytes: int | None) -> None:
    monkeypatch.setattr(memory_plan, "free_gpu_bytes", lambda gpu: free_bytes)
    for module in (devices, prepare_module):
        monkeypatch.setattr(module, "num_visible_gpus", lambda: number)


def test_the_plan_of_a_cpu_is_what_the_instances_take(model: Path) -> None:
    engine = prepared(model, instances=2, kv=KvConfig(memory_bytes=1 << 20))
    plan = memory_plan.plan_memory(engine)
    limits = make_local(0, plain_values(InstanceSettings(config=engine.config)), discard).limits
    assert plan.kv_tokens_per_instance == limits.kv_tokens
    numbers = sum(tensor.numel() for file in model.glob("*.safetensors") for tensor in load_file(file).values())
    assert (plan.weights_bytes, plan.num_weight_copies) == (4 * numbers, 1)  # float32, shared by both
    assert plan.kv_bytes_per_instance is not None
    assert plan.device_bytes == 4 * numbers + 2 * plan.kv_bytes_per_instance
    assert plan.pool_bytes == 2 * 2 * (1 << 20)
    assert plan.notes() == []


def test_kv_on_a_gpu_follows_what_is_free(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 2, 1 << 20)

    def plan(**settings: Any) -> memory_plan.MemoryPlan:
        return memory_plan.plan_memory(prepared(model, device="cuda", max_num_seqs=10**6, **settings))

    own, shared, refused = plan(instances=2), plan(instances=8, share_gpus=True), plan(instances=8)
    assert own.kv_bytes_per_instance == pytest.approx(0.6 * (1 << 20), rel=0.05)
    assert shared.kv_bytes_per_instance == pytest.approx(0.15 * (1 << 20), rel=0.05)
    assert (own.num_weight_copies, shared.num_weight_copies) == (1, 4)
    assert own.notes() == []
    assert "4 instances share cuda:0, as share_gpus asks" in shared.notes()
    assert "8 instances need 8 GPUs, got 2 (0, 1)" in refused.notes()


def test_a_gpu_that_is_not_there_is_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 0, None)
    plan = memory_plan.plan_memory(prepared(model, device="cuda"))
    assert (plan.kv_bytes_per_instance, plan.free_device_bytes) == (None, None)
    assert plan.notes() == [
        "there is no cuda:0 on this machine: sizes that follow its free memory are not known",
    ]
    assert "unknown" in "\n".join(plan.lines())


def test_too_much_memory_is_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "free_memory_bytes", lambda: 1 << 20)
    plan = memory_plan.plan_memory(prepared(model, kv=KvConfig(blocks=100_000)))
    assert "are needed and 1.0 MiB are free" in plan.notes()[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"instances": 1}, 0),
        ({"instances": 1, "pool": PoolConfig(memory_bytes=77)}, 77),
        ({"instances": 2, "pool": PoolConfig(backend="none")}, 0),
        ({"instances": 2, "pool": PoolConfig(memory_bytes=0)}, 0),
        ({"instances": 2, "pool": PoolConfig(memory_bytes=77)}, 77),
        ({"instances": 2, "pool": PoolConfig(backend="mooncake")}, None),
    ],
)
def test_the_pool_has_the_size_that_is_set(model: Path, settings: dict[str, Any], expected: int | None) -> None:
    assert memory_plan.pool_bytes(prepared(model, **settings)) == expected
