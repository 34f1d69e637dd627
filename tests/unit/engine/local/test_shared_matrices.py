# SPDX-License-Identifier: Apache-2.0
"""Packed matrices in shared memory: one copy for all who ask, and never a wrong or a missing one."""

from __future__ import annotations

import errno
import os
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from seer.engine.local import cpu_ops, shared_matrices
from seer.engine.local.shared_matrices import SharedMatrices

if not cpu_ops.available():
    pytest.skip("the native kernels are not built", allow_module_level=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1 << 40, 0, 1 << 40))
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"first")
    return path


def a_weight(seed: int = 0, outer: int = 1000) -> torch.Tensor:
    return torch.randn(outer, 300, generator=torch.Generator().manual_seed(seed))


def product(linear: object) -> torch.Tensor:
    assert isinstance(linear, cpu_ops.PanelLinear)
    return linear(torch.ones(3, 300))


def right(weight: torch.Tensor) -> torch.Tensor:
    return product(cpu_ops.PanelLinear(cpu_ops.to_panels(weight), None, len(weight)))


def files(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*") if path.is_file())


def test_the_second_to_ask_maps_what_the_first_packed(
    home: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [a_weight(seed) for seed in range(3)]
    made = SharedMatrices(home, [source])
    first = [made.linear(weight, None) for weight in weights]
    monkeypatch.setattr(shared_matrices, "fill_panels", None)  # packing again would fail
    again = SharedMatrices(home, [source])
    second = [again.linear(weight, None) for weight in weights]
    assert len(files(home)) == 3
    for weight, one, other in zip(weights, first, second, strict=True):
        assert torch.equal(product(one), right(weight))
        assert torch.equal(product(other), right(weight))
    # One memory: what is written through one map is read through the other.
    assert isinstance(first[1], cpu_ops.PanelLinear)
    first[1].panels.zero_()
    assert not product(second[1]).any()


def test_who_packs_at_the_same_time_and_is_slower_takes_the_others(
    home: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, pack, rival = a_weight(), cpu_ops.fill_panels, SharedMatrices(home, [source])

    def overtaken(panels: torch.Tensor, weight: torch.Tensor) -> None:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(shared_matrices, "fill_panels", pack)
            rival.linear(weight, None)
        pack(panels, weight)

    mine = SharedMatrices(home, [source])
    monkeypatch.setattr(shared_matrices, "fill_panels", overtaken)
    linear = mine.linear(weight, None)
    (file,) = files(home)
    assert torch.equal(product(linear), right(weight))
    assert isinstance(linear, cpu_ops.PanelLinear)
    torch.from_file(str(file), shared=True, size=linear.panels.numel()).zero_()
    assert not product(linear).any(), "mapped is the file that stayed"


@pytest.mark.parametrize("trouble", ["allocation", "room", "folder"])
def test_without_room_or_folder_a_matrix_is_packed_privately(
    home: Path, source: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    matrices = SharedMatrices(home, [source])
    if trouble == "allocation":
        monkeypatch.setattr(os, "posix_fallocate", no_room)
    elif trouble == "room":
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage(4 << 20, 0, 3 << 20))
    else:
        for path in home.iterdir():
            path.rmdir()
        home.rmdir()
    assert torch.equal(product(matrices.linear(a_weight(), None)), right(a_weight()))
    assert files(home) == []


def test_other_weights_replace_the_old_and_those_mapped_stay_readable(home: Path, source: Path) -> None:
    old = SharedMatrices(home, [source]).linear(a_weight(0), None)
    source.write_bytes(b"another")
    new = SharedMatrices(home, [source]).linear(a_weight(1), None)
    assert len(files(home)) == 1
    assert torch.equal(product(old), right(a_weight(0)))
    assert torch.equal(product(new), right(a_weight(1)))


def test_a_file_written_again_in_place_counts_as_other_weights(home: Path, source: Path) -> None:
    SharedMatrices(home, [source]).linear(a_weight(0), None)
    os.utime(source, ns=(1, 1))
    assert torch.equal(product(SharedMatrices(home, [source]).linear(a_weight(1), None)), right(a_weight(1)))


def test_small_matrices_make_no_file(home: Path, source: Path) -> None:
    weight = a_weight(outer=10)
    assert torch.equal(product(SharedMatrices(home, [source]).linear(weight, None)), right(weight))
    assert files(home) == []


@pytest.mark.parametrize("trouble", ["open folder", "open file", "link"])
def test_what_others_could_have_written_is_not_mapped(home: Path, source: Path, trouble: str) -> None:
    SharedMatrices(home, [source]).linear(a_weight(0), None)
    (file,) = files(home)
    if trouble == "open folder":
        home.chmod(0o755)
    elif trouble == "open file":
        file.chmod(0o666)
    else:
        file.rename(file.with_suffix(".moved"))
        file.symlink_to(file.with_suffix(".moved"))
    torch.from_file(str(file), shared=True, size=file.stat().st_size // 4).zero_()
    assert torch.equal(product(SharedMatrices(home, [source]).linear(a_weight(0), None)), right(a_weight(0)))


def test_folders_that_hold_no_matrices_are_left(home: Path, source: Path) -> None:
    (home / "precious").mkdir()
    SharedMatrices(home, [source]).linear(a_weight(0), None)
    assert (home / "precious").is_dir()
