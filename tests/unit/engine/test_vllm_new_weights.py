# SPDX-License-Identifier: Apache-2.0
"""New weights have the names of the checkpoint that an engine was started from: others are refused, with advice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
loading: Any = pytest.importorskip("transformers.core_model_loading", reason="models hold what checkpoints have")

from expert_models import deepseek, qwen3_moe
from seer.engine.staged_weights import stage
from seer.engine.vllm.model_folder import read_folder
from seer.engine.vllm.new_weights import identify
from seer.errors import InputError

MODELS: dict[str, Callable[..., Any]] = {"Qwen3-MoE": qwen3_moe, "DeepSeek-V3": deepseek}


def identity(folder: Path, weights: dict[str, Any]) -> str:
    """What an engine that was started from the folder calls the weights."""
    staged = stage(weights)
    try:
        return identify(read_folder(folder), staged.path)
    finally:
        staged.discard()


@pytest.mark.parametrize("name", MODELS)
def test_names_in_memory_are_refused_and_the_advice_gives_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    for given in (dict(model.named_parameters()), model.state_dict()):
        why = r"lack model\.layers\.\d\.mlp\.experts\.0\.down_proj\.weight \(and \d+ more\); the model has no model\."
        with pytest.raises(InputError, match=why) as refused:
            identity(tmp_path, given)
        assert "revert_weight_conversion(model, model.state_dict())" in str(refused.value.hint)
    advised = loading.revert_weight_conversion(model, model.state_dict())
    assert identity(tmp_path, advised) == identify(read_folder(tmp_path), tmp_path)
    other = MODELS[name](seed=1)
    assert identity(tmp_path, loading.revert_weight_conversion(other, other.state_dict())) != identity(
        tmp_path, advised
    )


def test_a_buffer_that_the_checkpoint_has_is_missed(tmp_path: Path) -> None:
    model = deepseek()
    model.save_pretrained(tmp_path)
    parameters = loading.revert_weight_conversion(model, dict(model.named_parameters()))
    with pytest.raises(InputError, match=r"lack model\.layers\.1\.mlp\.gate\.e_score_correction_bias$"):
        identity(tmp_path, parameters)


def test_a_tied_head_may_be_given_or_not(tmp_path: Path) -> None:
    model = qwen3_moe(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    advised = loading.revert_weight_conversion(model, model.state_dict())
    assert "lm_head.weight" in advised
    identity(tmp_path, advised)
    identity(tmp_path, {name: tensor for name, tensor in advised.items() if name != "lm_head.weight"})


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = qwen3_moe()
    model.save_pretrained(tmp_path)
    advised = loading.revert_weight_conversion(model, model.state_dict())
    advised["model.norm.weight"] = advised["model.norm.weight"][:32]
    with pytest.raises(InputError, match=r"model\.norm\.weight has shape \[32\], the model's \[64\]"):
        identity(tmp_path, advised)
