# SPDX-License-Identifier: Apache-2.0
"""Model folders: what is read, and what is refused with a clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file

from seer.engine.local.model_config import read_config
from seer.engine.local.tiny import make_tiny_model, tiny_config, tiny_weights
from seer.engine.local.weights import check, open_weights
from seer.errors import InputError


def a_folder(tmp_path: Path, **changes: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config() | changes))
    return tmp_path


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_good_folder_is_read(tmp_path: Path, family: str) -> None:
    config = read_config(make_tiny_model(tmp_path, family))
    assert config.family == family
    assert config.qkv_bias == (family == "qwen2")
    assert config.qk_norm == (family == "qwen3")
    assert config.eos_token_ids == (2,)
    check(config, open_weights(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type='mamba' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"num_experts": 8}, "mixture-of-experts"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope scaling 'yarn'"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None"),
        ({"num_attention_heads": 3}, "num_heads=3 is not a multiple of num_kv_heads=2"),
    ],
)
def test_an_unsupported_folder_is_refused_by_name(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_config(a_folder(tmp_path, **changes))


def test_missing_and_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read_config(tmp_path)
    with pytest.raises(InputError, match=r"no \*\.safetensors"):
        open_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="cannot be read"):
        open_weights(tmp_path)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    config = read_config(a_folder(tmp_path))
    weights = tiny_weights(tiny_config())
    missing = {name: value for name, value in weights.items() if "layers.1.mlp" not in name}
    with pytest.raises(InputError, match=r"lack model\.layers\.1\.mlp\.gate_proj\.weight \(and 2 more\)"):
        check(config, missing)
    with pytest.raises(InputError, match="not part of this llama model"):
        check(config, weights | {"model.extra.weight": torch.zeros(1)})
    with pytest.raises(InputError, match=r"shape \[3\], config\.json says \[64\]"):
        check(config, weights | {"model.norm.weight": torch.zeros(3)})


def test_end_tokens_of_the_generation_config_count_too(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert read_config(folder).eos_token_ids == (2, 7)


def test_end_tokens_that_the_model_cannot_generate_are_left_out(tmp_path: Path) -> None:
    """Before `min_tokens` end tokens are excluded by their place among the logits, where these have none."""
    folder = a_folder(tmp_path, eos_token_id=[2, tiny_config()["vocab_size"]])
    assert read_config(folder).eos_token_ids == (2,)


def test_a_folder_in_several_files_is_read(tmp_path: Path) -> None:
    config = read_config(a_folder(tmp_path))
    weights = list(tiny_weights(tiny_config()).items())
    save_file(dict(weights[:5]), tmp_path / "model-00001-of-00002.safetensors")
    save_file(dict(weights[5:]), tmp_path / "model-00002-of-00002.safetensors")
    index = {name: f"model-0000{1 + (at >= 5)}-of-00002.safetensors" for at, (name, _) in enumerate(weights)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    check(config, open_weights(tmp_path))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match="lacks model-00002"):
        open_weights(tmp_path)
