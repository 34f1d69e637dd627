# SPDX-License-Identifier: Apache-2.0
"""Weights are known by their content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from seer.errors import InputError
from seer.runs import weights_identity as module
from seer.runs.weights_identity import NO_WEIGHTS, SAMPLE_BYTES, weights_identity

TENSOR_BYTES = 5 * SAMPLE_BYTES


def a_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"rope_theta": 1}')
    for number in range(2):
        offsets = {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES]}
                   for i in range(3)}  # fmt: skip
        header = json.dumps({"__metadata__": {"format": "pt"}, **offsets}).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(3 * TENSOR_BYTES)
        (path / f"model-{number}.safetensors").write_bytes(content)
    return path


@pytest.fixture(params=["whole", "sampled"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "FULL_BYTES", 1 << 30 if request.param == "whole" else 1000)
    module._content.cache_clear()
    return a_folder(tmp_path / "model")


def flipped(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text('{"rope_theta": 2}'),
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": 3}'),
        lambda folder: (folder / "model-1.safetensors").unlink(),
        lambda folder: shutil.copy(folder / "model-1.safetensors", folder / "model-2.safetensors"),
        lambda folder: (folder / "model-0.safetensors").write_bytes(
            (folder / "model-0.safetensors").read_bytes().replace(b"U8", b"I8")
        ),
        lambda folder: flipped(folder / "model-0.safetensors", -1),
        lambda folder: flipped(folder / "model-1.safetensors", -TENSOR_BYTES),
        lambda folder: flipped(folder / "model-1.safetensors", -TENSOR_BYTES - 1),
        lambda folder: flipped(folder / "model-1.safetensors", -TENSOR_BYTES // 2),
        lambda folder: (folder / "model-0.safetensors").write_bytes(
            (folder / "model-0.safetensors").read_bytes() + b"\0"
        ),
    ],
    ids=["config", "end tokens", "no file", "more files", "header", "end", "begin", "middle", "first end", "size"],
)
def test_what_changes_the_model_changes_the_name(folder: Path, change: Callable[[Path], object]) -> None:
    before = weights_identity(folder)
    (folder / "model-0.safetensors").touch()
    (folder / "tokenizer.json").write_text("{}")
    assert weights_identity(shutil.copytree(folder, folder.parent / "moved")) == before
    assert weights_identity(folder) == before
    change(folder)
    assert weights_identity(folder) != before


def test_a_file_has_a_name_too_and_no_model_has_none(folder: Path, tmp_path: Path) -> None:
    names = {weights_identity(path) for path in folder.iterdir() if path.suffix == ".safetensors"}
    assert len(names) == 2  # of one content, under two names
    assert weights_identity(None) == NO_WEIGHTS
    with pytest.raises(InputError, match="absent cannot be read"):
        weights_identity(tmp_path / "absent")


def test_a_large_file_that_is_no_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FULL_BYTES", 0)
    for content in (b"x" * 20, b"\2\0\0\0\0\0\0\0{]", b"\x09\0\0\0\0\0\0\0" + b'{"a": 1} '):
        (tmp_path / "w").write_bytes(content)
        with pytest.raises(InputError, match="not a safetensors file"):
            weights_identity(tmp_path / "w")
