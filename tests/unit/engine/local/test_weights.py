# SPDX-License-Identifier: Apache-2.0
"""Values of weights: NaN and infinity are found on the way in, in every dtype, and nothing else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from engines import an_engine
from seer.engine.local.model_config import read_config
from seer.engine.local.tiny import make_tiny_model
from seer.engine.local.weights import TensorFiles, check, check_finite, fingerprint, open_weights
from seer.errors import InputError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_every_value_that_is_not_finite_is_counted(dtype: Any, value: float) -> None:
    tensor = torch.ones(17, 19)
    tensor[3, 4] = tensor[16, 18] = value
    with pytest.raises(InputError, match="w has 2 values of 323 that are NaN or infinite"):
        check_finite("w", tensor.to(dtype))


def test_infinities_that_cancel_are_found() -> None:
    with pytest.raises(InputError, match="w has 2 values of 2 "):
        check_finite("w", torch.tensor([float("inf"), float("-inf")]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_finite_values_are_not_refused(dtype: Any) -> None:
    tensor = torch.full((64,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    assert check_finite("w", tensor) is tensor  # their sum overflows


def test_a_folder_with_bad_weights_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "bad")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model\.layers\.0\.self_attn\.k_proj\.weight has 1 values of 2048 "):
        an_engine(folder)


def test_weights_that_overflow_in_the_dtype_are_refused_with_a_hint(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "large")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 1e6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lm_head\.weight has .* in float16") as refused:
        an_engine(folder, dtype=torch.float16)
    assert "a dtype with a larger range" in str(refused.value.hint)


def test_a_tensor_is_read_from_its_file_once_and_not_to_be_found(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    tensors = open_weights(folder)
    assert isinstance(tensors, TensorFiles)
    reads: list[str] = []

    class Counting:
        def __init__(self, handle: Any) -> None:
            self._handle = handle

        def get_tensor(self, name: str) -> Any:
            reads.append(name)
            return self._handle.get_tensor(name)

    tensors._open = {path: Counting(handle) for path, handle in tensors._open.items()}
    check(read_config(folder), tensors)
    assert not reads
    assert "lm_head.bias" not in tensors
    for name in tensors:
        assert tensors[name] is tensors[name]
    fingerprint(tensors)
    assert sorted(reads) == sorted(tensors)
