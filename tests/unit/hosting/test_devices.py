# SPDX-License-Identifier: Apache-2.0
"""Each instance's process is launched with its own GPUs or cores, told by the environment; without a GPU."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seer import Rollout
from seer.cli.main import build_parser
from seer.cli.run_config import read_run
from seer.config import HostingConfig, RolloutConfig, from_keywords, read_config_file
from seer.errors import ConfigError
from seer.hosting import devices
from seer.hosting.devices import InstanceDevices, assign_devices

VISIBLE = "CUDA_VISIBLE_DEVICES"


def see_gpus(monkeypatch: pytest.MonkeyPatch, number: int, visible: str | None = None) -> None:
    monkeypatch.setattr(devices, "num_visible_gpus", lambda: number)
    if visible is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, visible)


def shown(**settings: Any) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each instance."""
    config = RolloutConfig(model="m", engine="vllm", **{"device": "cuda", **settings}).fitted()
    return [own.environment[VISIBLE] for own in assign_devices(config)]


def test_eight_instances_have_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 8)
    assert shown(instances=8) == list("01234567")
    assert shown(instances=2, gpus=(4, 6)) == ["4", "6"]
    assert shown(instances=2, tensor_parallel=4) == ["0,1,2,3", "4,5,6,7"]
    assert shown(device="cuda:5") == ["5"]
    assert shown(device="cuda:5", instances=2, share_gpus=True) == ["5", "5"]


def test_what_this_process_may_see_is_all_that_instances_get(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 4, "4,5,6,7")
    assert shown(instances=4) == ["4", "5", "6", "7"]
    assert shown(instances=1, gpus=(1,)) == ["5"]
    with pytest.raises(ConfigError, match="no GPU 4: 4 are visible"):
        shown(gpus=(4,))


@pytest.mark.parametrize(
    "settings", [{"instances": 3}, {"instances": 2, "tensor_parallel": 2}, {"instances": 2, "device": "cuda:1"}]
)
def test_too_few_gpus_are_refused_before_anything_starts(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match="got"):
        shown(**settings)


def test_without_a_gpu_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 0)

    async def start() -> None:
        async with Rollout("m", engine="fake", device="cuda"):
            pass

    with pytest.raises(ConfigError, match="1 instance needs 1 GPU, got 0"):
        asyncio.run(start())


def test_a_process_is_launched_with_its_own_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    see_gpus(monkeypatch, 3, "2,GPU-b,5")
    told = launched_with(tmp_path, device="cuda", gpus="1,2")
    assert [line.split(", cores")[0] for line in told] == ["device cuda, GPUs GPU-b", "device cuda, GPUs 5"]


def test_a_process_calls_its_gpu_the_first_whatever_the_driver_calls_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    see_gpus(monkeypatch, 3)
    told = launched_with(tmp_path, device="cuda:2", share_gpus=True)
    assert [line.split(", cores")[0] for line in told] == ["device cuda, GPUs 2"] * 2


@pytest.mark.parametrize(
    ("weights_on", "gpus", "in_place"),
    [({0}, [(0,), (0,)], True), ({0}, [(0,), (1,)], False), ({0}, [(1,)], False), ({0, 1}, [(0,)], False)],
)
def test_weights_stay_in_place_only_if_every_instance_sees_their_gpu(
    weights_on: set[int], gpus: list[tuple[int, ...]], in_place: bool
) -> None:
    fleet = Rollout("m", engine="fake").fleet
    object.__setattr__(fleet._engine, "opens_gpu_handles", True)
    fleet.devices = [InstanceDevices(gpus=own) for own in gpus]
    weights: Any = {str(gpu): SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=gpu)) for gpu in weights_on}
    assert fleet._stay_in_place(weights) is in_place


def test_a_cpu_process_is_kept_on_its_own_cores(tmp_path: Path) -> None:
    told = launched_with(tmp_path, device="cpu")
    cores = [re.findall(r"\d+", line.split("cores")[1]) for line in told]
    expected = [own.cores for own in assign_devices(RolloutConfig(model="m", instances=2).fitted())]
    assert [tuple(map(int, own)) for own in cores] == expected
    assert len(os.sched_getaffinity(0)) == 1 or cores[0] != cores[1]


def launched_with(folder: Path, **settings: Any) -> list[str]:
    """What two instances' processes say they were given."""

    async def start() -> None:
        rollout = Rollout("m", engine="fake", instances=2, hosting=HostingConfig(log_dir=folder), **settings)
        object.__setattr__(rollout.engine, "factory", "host_fakes:make_telling")
        async with rollout:
            pass

    asyncio.run(start())
    return [(folder / f"instance-{id}.log").read_text().splitlines()[0] for id in range(2)]


def test_ranks_have_a_core_each_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "numa_nodes", lambda: [[0, 1, 2], [3, 4, 5]])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    config = RolloutConfig(model="m", engine="vllm", instances=2, tensor_parallel=2).fitted()
    assert [own.cores for own in assign_devices(config)] == [(0, 1), (3, 4)]
    assert all(not own.environment for own in assign_devices(config))


def test_cores_of_instances_that_join_are_free_ones_of_the_emptiest_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "numa_nodes", lambda: [[0, 1, 2, 3], [4, 5, 6, 7]])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    config = RolloutConfig(model="m", engine="vllm", instances=1).fitted()
    first = assign_devices(config)
    second = assign_devices(replace(config, tensor_parallel=2), first)
    assert [own.cores for own in (*first, *second)] == [(0,), (4, 5)]
    third = assign_devices(replace(config, tensor_parallel=4), [*first, *second])
    assert [own.cores for own in third] == [(1, 2, 3, 6)], "no node has four free ones"
    fourth = assign_devices(config, [*first, *second, *third, InstanceDevices(cores=(7,))])
    assert len(fourth[0].cores or ()) == 1, "they take turns where none is free"


def test_gpus_are_set_on_the_command_line_in_a_file_and_in_python(tmp_path: Path) -> None:
    words = ["rollout", "--device", "cuda", "--engine", "vllm", "--gpus", "0,4-6", "--share-gpus"]
    by_option = read_run(build_parser().parse_args([*words, "--tensor-parallel", "2"])).rollout
    file = tmp_path / "run.toml"
    file.write_text(
        '[rollout]\ndevice = "cuda"\nengine = "vllm"\ngpus = "0,4-6"\nshare_gpus = true\ntensor_parallel = 2\n'
    )
    settings: dict[str, Any] = {"device": "cuda", "engine": "vllm", "share_gpus": True, "tensor_parallel": 2}
    in_python = from_keywords("smollm2", {**settings, "gpus": [0, 4, 5, 6]})
    for config in (by_option, read_config_file(file).rollout, in_python):
        assert (config.gpus, config.share_gpus, config.tensor_parallel) == ((0, 4, 5, 6), True, 2)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"gpus": (0,), "device": "cpu"}, "device='cpu'"),
        ({"gpus": (0,), "device": "cuda:1"}, "device='cuda:1'"),
        ({"gpus": (0, 0), "device": "cuda"}, "gpus="),
        ({"gpus": (), "device": "cuda"}, "gpus="),
        ({"tensor_parallel": 2}, "engine 'local' runs on one device"),
        ({"tensor_parallel": 0, "engine": "vllm"}, "tensor_parallel=0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        RolloutConfig(model="m", **settings)
