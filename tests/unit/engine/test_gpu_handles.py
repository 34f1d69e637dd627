# SPDX-License-Identifier: Apache-2.0
"""Handles of GPU memory as a file: data of a fixed form, from this user's folder alone. (On a GPU: tests/gpu.)"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from torch.multiprocessing import reductions

from seer.engine.gpu_handles import SUFFIX, open_handles, write_handles
from seer.engine.local.weights import open_weights
from seer.errors import InputError
from seer.machine import private_files

ARGUMENTS = (
    *(torch.Tensor, torch.Size([2, 3]), (3, 1), 5, torch.storage.TypedStorage, torch.bfloat16),
    *(0, b"memory", 512, 64, False, b"counter", 7, b"event", True),
)
"""As torch gives them for a tensor on a GPU."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(private_files, "SHARED_MEMORY", tmp_path)
    return private_files.folder(tmp_path)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def write_as_if_on_a_gpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (reductions.rebuild_cuda_tensor, ARGUMENTS))
    write_handles({"a": torch.ones(2, 3)}, path)


def test_what_torch_needs_to_map_a_tensor_comes_back_as_it_was(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = home / f"model{SUFFIX}"
    write_as_if_on_a_gpu(path, monkeypatch)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: arguments)
    assert open_weights(path) == {"a": ARGUMENTS}
    assert private_files.check_file(path)


@pytest.mark.parametrize("place", ["home", "elsewhere"])
def test_nothing_is_unpickled(home: Path, tmp_path: Path, place: str) -> None:
    path = (home if place == "home" else tmp_path) / f"x{SUFFIX}"
    private_files.write(path, pickle.dumps({"a": Evil(tmp_path / "executed")}))
    with pytest.raises(InputError, match="handles of GPU memory"):
        open_weights(path)
    assert not (tmp_path / "executed").exists()


def test_handles_outside_of_the_own_folder_are_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / f"model{SUFFIX}"
    write_as_if_on_a_gpu(path, monkeypatch)
    path.rename(tmp_path / path.name)
    for other in (tmp_path / path.name, home / ".." / path.name):
        with pytest.raises(InputError, match="is not in the folder of this user"):
            open_handles(other)
    path.symlink_to(tmp_path / path.name)
    with pytest.raises(InputError, match="not a regular file"):
        open_handles(path)


@pytest.mark.parametrize(
    "change", [{"dtype": "nn"}, {"dtype": "float99"}, {"shape": [-1]}, {"device": -1}, {"memory": "text"}, {"more": 1}]
)
def test_handles_of_another_form_are_refused(home: Path, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = home / f"model{SUFFIX}"
    write_as_if_on_a_gpu(path, monkeypatch)
    handles = msgspec.msgpack.decode(path.read_bytes())
    private_files.write(path, msgspec.msgpack.encode({"a": handles["a"] | change}))
    with pytest.raises(InputError):
        open_handles(path)


def test_handles_that_are_gone_are_an_error_of_one_line(home: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        open_handles(home / f"gone{SUFFIX}")
