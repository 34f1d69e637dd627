# SPDX-License-Identifier: Apache-2.0
"""What a rollout gets of a model in TRL is what `save_pretrained` writes, whatever the model holds in memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")
loading: Any = pytest.importorskip("transformers.core_model_loading", reason="models hold what checkpoints have")

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, GPTNeoXConfig, HrmTextConfig

from expert_models import deepseek, qwen3_moe
from seer.engine.staged_weights import remove_shared_folder
from seer.errors import ConfigError
from seer.integrations.trl import trainer_weights
from seer.integrations.trl.model_parts import Part
from seer.integrations.trl.trainer_weights import (
    WEIGHTS_FILE,
    are_as_held,
    refuse_unreadable,
    stamp_of,
    tensors_of,
    write_model_folder,
    write_weights,
)
from trl_folders import a_trainer, with_trained_adapters, written
from trl_toy import toy_model

Tensors = dict[str, torch.Tensor]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def a_deepseek() -> Any:
    model = deepseek()
    # A buffer, which no optimizer changes and every checkpoint has.
    model.get_buffer(BIAS).copy_(torch.arange(8.0))
    return model


def one_with_a_table() -> Any:
    model: Any = toy_model(0)
    model.model.layers[0].mlp.register_buffer("experts_of_tokens", torch.arange(6).reshape(3, 2))
    model.model.layers[0].mlp.register_buffer("is_shared", torch.tensor([True, False]))
    model.model.layers[0].mlp.register_buffer("forgotten", torch.ones(2), persistent=False)
    return model


def a_gpt_neox() -> Any:
    """Its head has another name in checkpoints."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return from_config(GPTNeoXConfig(vocab_size=64, **sizes))


def a_transposed_one() -> Any:
    model: Any = toy_model(0)
    matrix = loading.WeightConverter("mlp.down.matrix", "mlp.down_proj.weight", operations=[loading.Transpose(0, 1)])
    model._weight_conversions = [matrix]
    return model


def one_that_joins() -> Any:
    """Its checkpoint has one matrix for queries, keys, values and gates, and the model has four."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16}
    return from_config(HrmTextConfig(vocab_size=64, num_hidden_layers=2, **sizes))


def from_config(config: Any) -> Any:
    auto: Any = AutoModelForCausalLM  # untyped
    return auto.from_config(config)


MODELS: dict[str, Callable[[], Any]] = {
    "Qwen3-MoE": qwen3_moe,
    "DeepSeek-V3": a_deepseek,
    "Llama": lambda: toy_model(0),
    "GPT-NeoX": a_gpt_neox,
    "a table of whole numbers": one_with_a_table,
    "transposed": a_transposed_one,
}
VIEWS = ["Qwen3-MoE", "DeepSeek-V3", "Llama", "GPT-NeoX"]
EXPERTS = ["Qwen3-MoE", "DeepSeek-V3"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "of attention": {"target_modules": ["q_proj", "o_proj"]},
    "of experts too": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


def saved(model: Any, folder: Path) -> Tensors:
    model.save_pretrained(folder)
    return load_file(folder / WEIGHTS_FILE)


def read_back(model: Any, folder: Path) -> Any:
    """The model as `from_pretrained` makes it, which notes what it has converted."""
    model.save_pretrained(folder)
    auto: Any = AutoModelForCausalLM  # untyped
    return auto.from_pretrained(folder)


def adapted(model: Any, config: dict[str, Any]) -> Any:
    return with_trained_adapters(model, LoraConfig(r=4, **config))


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in found.items():
        assert (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype), name
        assert torch.equal(tensor, expected[name]), name


def is_within(tensor: torch.Tensor, model: Any) -> bool:
    """Whether the tensor is a tensor of the model, or a piece of one."""
    pointers = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    return tensor.is_contiguous() and tensor.untyped_storage().data_ptr() in pointers


@pytest.mark.parametrize("name", MODELS)
def test_the_folder_has_what_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    refuse_unreadable(a_trainer(model))
    assert_same(written(model)[0], saved(model, tmp_path))


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_have_tensors_of_their_own_in_the_folder(name: str) -> None:
    """As real checkpoints have them; this is what makes vLLM's loaders find them."""
    assert written(MODELS[name]())[0]["model.layers.1.mlp.experts.7.gate_proj.weight"].shape == (32, 64)


@pytest.mark.parametrize("name", VIEWS)
def test_the_same_goes_for_a_model_that_was_read_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    model = read_back(MODELS[name](), tmp_path / "checkpoint")
    expected = saved(model, tmp_path / "again")
    assert_same(written(model)[0], expected)
    assert_same(expected, load_file(tmp_path / "checkpoint" / WEIGHTS_FILE))


@pytest.mark.parametrize("name", VIEWS)
def test_tensors_are_handed_over_without_copies(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    trainer = a_trainer(model)
    assert are_as_held(trainer)
    tensors = tensors_of(trainer)
    assert [one for one, tensor in tensors.items() if not is_within(tensor, model)] == []
    assert_same(tensors, saved(model, tmp_path))


def test_tensors_that_only_copies_can_make_go_through_a_file(tmp_path: Path) -> None:
    model = a_transposed_one()
    assert not are_as_held(a_trainer(model))
    folder = write_weights(a_trainer(model))
    try:
        assert_same(load_file(folder / WEIGHTS_FILE), saved(model, tmp_path))
    finally:
        remove_shared_folder(folder)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", EXPERTS)
def test_a_merged_adapter_is_written_as_it_would_be_saved(name: str, adapter: str, tmp_path: Path) -> None:
    config = ADAPTERS[adapter]
    if name == "DeepSeek-V3":
        config = config | {"target_modules": ["q_proj", "kv_b_proj"]}
    model = adapted(MODELS[name](), config)
    refuse_unreadable(a_trainer(model))
    tensors, plain = written(model)[0], written(MODELS[name]())[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = copy.deepcopy(model).merge_and_unload()
    assert_same(tensors, saved(merged, tmp_path))
    changed = {one for one in plain if not torch.equal(tensors[one], plain[one])}
    assert "model.layers.0.self_attn.q_proj.weight" in changed
    assert any(".experts." in one for one in changed) == (adapter == "of experts too")


@pytest.mark.parametrize("is_read_back", [False, True])
def test_a_dense_model_pays_nothing(is_read_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same names in the same order, the same tensors, and no conversion is asked about a tensor that has values."""
    model = toy_model(0)
    if is_read_back:
        model = read_back(model, tmp_path)
    calls: list[set[str]] = []
    revert = loading.revert_weight_conversion

    def counted(model: Any, tensors: Tensors) -> Tensors:
        calls.append({tensor.device.type for tensor in tensors.values()})
        found: Tensors = revert(model, tensors)
        return found

    monkeypatch.setattr(loading, "revert_weight_conversion", counted)
    tensors, held = tensors_of(a_trainer(model)), dict(model.named_parameters())
    assert list(tensors) == list(held)
    assert all(tensors[name].data_ptr() == held[name].data_ptr() for name in held)
    assert list(written(model)[0]) == sorted(held)
    assert calls == [{"meta"}] * 2, "one look at the names for each of the two"


@pytest.mark.parametrize("name", ["Qwen3-MoE", "DeepSeek-V3", "GPT-NeoX"])
def test_tensors_gathered_from_ranks_are_written_like_whole_ones(name: str, tmp_path: Path) -> None:
    """FSDP2 gives the model a class of its own, by which transformers would not find GPT-NeoX's conversion."""
    model = MODELS[name]()
    expected = saved(model, tmp_path)
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        body = model.gpt_neox if name == "GPT-NeoX" else model.model
        for layer in body.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert type(model).__name__.startswith("FSDP")
        refuse_unreadable(a_trainer(model, is_fsdp2=True))
        assert not are_as_held(a_trainer(model, is_fsdp2=True))
        tensors, config = written(model, is_fsdp2=True)
    finally:
        torch.distributed.destroy_process_group()
    assert_same(tensors, expected)
    assert not config["architectures"][0].startswith("FSDP")


def test_fused_experts_are_gathered_one_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is let go before the next is gathered: a model with experts may be larger than a rank's memory."""
    asked: list[set[str]] = []
    read = Part.copy

    def noted(part: Any, whole: Any) -> Any:
        asked.append(set(part.like))
        return read(part, whole)

    monkeypatch.setattr(Part, "copy", noted)
    written(qwen3_moe())
    assert all(len(names) == 1 for names in asked)
    assert {"model.layers.0.mlp.experts.gate_up_proj"} in asked


def test_what_a_checkpoint_joins_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(trainer_weights, "make_shared_folder", lambda kind, *_, **__: made.append(kind))
    trainer = a_trainer(one_that_joins())
    for refuses in (refuse_unreadable, are_as_held, write_model_folder, write_weights):
        with pytest.raises(
            ConfigError, match=r"gqkv_proj.weight of a HrmText.* cannot be made from one part"
        ) as refused:
            refuses(trainer)
        assert refused.value.hint
    assert not made


def test_a_buffer_of_the_checkpoint_changes_the_stamp() -> None:
    model = a_deepseek()
    before = stamp_of(a_trainer(model))
    model.get_buffer(BIAS).add_(1.0)
    assert stamp_of(a_trainer(model)) != before
