# SPDX-License-Identifier: Apache-2.0
"""Adapters of real peft, merged for a rollout: what peft's own merge would save, and a model left as it was."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

import torch
from peft import (
    AdaptionPromptConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PolyConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
)
from safetensors.torch import load_file

from seer.engine.staged_weights import remove_shared_folder
from seer.errors import ConfigError
from seer.integrations.trl.adapters import refuse_unmergeable
from seer.integrations.trl.trainer_weights import (
    WEIGHTS_FILE,
    are_as_held,
    refuse_unreadable,
    stamp_of,
    tensors_of,
    write_weights,
)
from trl_folders import a_trainer, with_trained_adapters, written
from trl_toy import toy_model

SOME = ["q_proj", "v_proj", "down_proj"]
KINDS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: LoraConfig(target_modules=SOME),
    "DoRA": lambda: LoraConfig(target_modules=SOME, use_dora=True),
    "rsLoRA": lambda: LoraConfig(target_modules=SOME, use_rslora=True, lora_alpha=3),
    "PiSSA": lambda: LoraConfig(target_modules=SOME, init_lora_weights="pissa"),
    "LoRA with a trained norm": lambda: LoraConfig(target_modules=SOME, modules_to_save=["norm"]),
    "LoRA with a trained embedding": lambda: LoraConfig(target_modules=SOME, modules_to_save=["embed_tokens"]),
    "LoRA with a trained head": lambda: LoraConfig(target_modules=SOME, modules_to_save=["lm_head"]),
    "LoRA with a trained embedding, still tied": lambda: LoraConfig(
        target_modules=SOME, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "LoRA with trained tokens": lambda: LoraConfig(target_modules=SOME, trainable_token_indices=[3, 4]),
    "LoRA of the embedding": lambda: LoraConfig(target_modules=[*SOME, "embed_tokens"]),
    "IA3": lambda: IA3Config(target_modules=SOME, feedforward_modules=["down_proj"]),
    "LoHa": lambda: LoHaConfig(target_modules=SOME),
    "LoKr": lambda: LoKrConfig(target_modules=SOME),
    "VeRA": lambda: VeraConfig(target_modules=["q_proj"]),
    "OFT": lambda: OFTConfig(target_modules=SOME, oft_block_size=16, r=0),
    "norms": lambda: LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM"),
}
UNTIED = ("LoRA with a trained embedding", "LoRA with a trained head", "LoRA of the embedding")


def adapted(config: Any, *, dtype: torch.dtype = torch.float32) -> Any:
    base: Any = toy_model(0)
    return with_trained_adapters(base.to(dtype), config)


def merged_by_peft(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(model).merge_and_unload()


def state_of(model: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Every tensor, and what peft notes of its layers in lists and dicts."""
    tensors = {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    notes = [
        (name, key, repr(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, dict | list | set) and not key.startswith(("_parameters", "_modules", "_buffers"))
    ]
    return tensors, notes


@pytest.mark.parametrize("kind", KINDS)
def test_the_rollout_gets_what_merge_and_unload_would_save(kind: str) -> None:
    model = adapted(KINDS[kind]())
    refuse_unreadable(a_trainer(model))
    tensors, config = written(model)
    expected = merged_by_peft(model)
    named = dict(expected.named_parameters(remove_duplicate=False))
    if kind not in UNTIED:
        named.pop("lm_head.weight")
    assert tensors.keys() == named.keys()
    for name, tensor in tensors.items():
        if (kind, name) != ("LoRA of the embedding", "lm_head.weight"):
            assert torch.equal(tensor, named[name]), name
    assert config["tie_word_embeddings"] == (kind not in UNTIED)
    assert config["architectures"] == ["LlamaForCausalLM"]
    plain = dict(toy_model(0).named_parameters())
    assert any(not torch.equal(tensors[name], plain[name]) for name in plain), "the adapter changed nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_computes_the_same_with_what_the_rollout_gets(kind: str) -> None:
    """Merging and computing agree, for embeddings that an adapter unties as well."""
    model = adapted(KINDS[kind]()).eval()
    tensors, config = written(model)
    alone = toy_model(0)
    if not config["tie_word_embeddings"]:
        alone.lm_head.weight = torch.nn.Parameter(alone.lm_head.weight.clone())
    missing, unexpected = alone.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    tokens = torch.tensor([[3, 5, 5, 7, 9, 4]])
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, alone(tokens).logits, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_reading_changes_nothing_of_the_model(kind: str) -> None:
    model = adapted(KINDS[kind]())
    tensors, notes = state_of(model)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    written(model)
    after, notes_after = state_of(model)
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[name], tensors[name]) for name in tensors)
    assert notes_after == notes
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_in_bfloat16_too_the_weights_are_those_that_peft_saves() -> None:
    model = adapted(LoraConfig(target_modules=SOME), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float32}
    tensors, _ = written(model)
    expected = dict(merged_by_peft(model).named_parameters())
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_adapters_that_are_disabled_or_merged_already_are_left_as_they_are() -> None:
    model = adapted(LoraConfig(target_modules=SOME))
    base = dict(toy_model(0).named_parameters())
    with model.disable_adapter():
        tensors, _ = written(model)
    assert all(torch.equal(tensors[name], base[name]) for name in base)
    expected, _ = written(model)
    model.merge_adapter()
    tensors, _ = written(model)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_the_active_adapter_is_rolled_out_and_not_the_reference() -> None:
    model = adapted(LoraConfig(target_modules=SOME))
    expected, _ = written(model)
    model.add_adapter("ref", LoraConfig(target_modules=SOME))
    tensors, _ = written(model)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_adapters_that_transformers_itself_has_added_are_merged() -> None:
    model: Any = toy_model(0)
    model.add_adapter(LoraConfig(target_modules=SOME))
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.add_(1.0)
    tensors, _ = written(model)
    plain = dict(toy_model(0).named_parameters())
    assert tensors.keys() == plain.keys()
    changed = {name for name in plain if not torch.equal(tensors[name], plain[name])}
    assert changed == {"model.layers.0.self_attn.q_proj.weight"}


def test_the_stamp_changes_with_the_adapter_and_with_which_is_active() -> None:
    model = adapted(LoraConfig(target_modules=SOME))
    trainer = a_trainer(model)
    before = stamp_of(trainer)
    assert stamp_of(trainer) == before
    with model.disable_adapter():
        assert stamp_of(trainer) != before
    assert stamp_of(trainer) == before
    with torch.no_grad():
        model.base_model.model.model.layers[1].mlp.down_proj.lora_B["default"].weight.mul_(1.5)
    assert stamp_of(trainer) != before


def test_weights_without_adapters_are_handed_over_as_they_are() -> None:
    model = toy_model(0)
    trainer = a_trainer(model)
    assert are_as_held(trainer)
    held = dict(model.named_parameters())
    tensors = tensors_of(trainer)
    assert list(tensors) == list(held)
    assert all(tensors[name].data_ptr() == held[name].data_ptr() for name in held)
    assert not are_as_held(a_trainer(adapted(LoraConfig(target_modules=SOME))))


def test_names_lose_what_wraps_layers_for_training() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = toy_model(0)
    expected = list(tensors_of(a_trainer(model)))
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert list(tensors_of(a_trainer(model))) == expected


def test_new_weights_alone_are_a_file_that_other_programs_read() -> None:
    model = adapted(LoraConfig(target_modules=SOME))
    folder = write_weights(a_trainer(model))
    try:
        assert [path.name for path in folder.iterdir() if path.name.endswith("safetensors")] == [WEIGHTS_FILE]
        tensors = load_file(folder / WEIGHTS_FILE)
    finally:
        remove_shared_folder(folder)
    expected, _ = written(model)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PROMPT_TUNING"),
        (lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PREFIX_TUNING"),
        (lambda: AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1), "ADAPTION_PROMPT"),
        (lambda: PolyConfig(task_type="CAUSAL_LM", target_modules=SOME, n_tasks=2), "poly.Linear of .*q_proj"),
        (lambda: LoraConfig(target_modules=SOME, layer_replication=[(0, 2), (1, 2)]), "layer_replication"),
    ],
)
def test_adapters_that_are_no_weights_are_refused_by_name(config: Callable[[], Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"peft_config: .*{named}"):
        refuse_unreadable(a_trainer(adapted(config())))


def test_an_adapter_that_says_so_only_when_it_is_merged_is_refused_before_anything_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Path] = []

    def make(kind: str, num_bytes: int, **rest: Any) -> Path:
        made.append(tmp_path / kind)
        made[-1].mkdir()
        return made[-1]

    monkeypatch.setattr("seer.integrations.trl.trainer_weights.make_shared_folder", make)
    model = adapted(LoraConfig(task_type="CAUSAL_LM", target_modules=SOME, alora_invocation_tokens=[3]))
    with pytest.raises(ConfigError, match=r"lora.Linear of model.layers.0.self_attn.q_proj cannot be merged: aLoRA"):
        written(model)
    assert made
    assert not any(path.exists() for path in made)


def test_a_quantised_base_is_refused() -> None:
    model = adapted(LoraConfig(target_modules=SOME))
    refuse_unmergeable(model)
    base = model.base_model.model.model.layers[0].mlp.down_proj.base_layer
    base.weight = torch.nn.Parameter(base.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match="quantised"):
        refuse_unmergeable(model)
