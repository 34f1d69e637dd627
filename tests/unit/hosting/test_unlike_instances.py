# SPDX-License-Identifier: Apache-2.0
"""Instances that join with settings of their own: what their processes are launched with, and what is refused."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from seer import HostingConfig, Rollout
from seer.engine.local.tiny import make_tiny_model
from seer.engine.prepare import InstanceSpec, prepare_beside
from seer.errors import ConfigError
from seer.hosting import devices, fleet, memory_limits
from seer.hosting.devices import InstanceDevices
from seer.hosting.hostings import LocalHosting
from seer.hosting.launcher import Child, LocalLauncher

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_attention_heads=8, num_key_value_heads=8)


@pytest.fixture(autouse=True)
def eight_gpus_and_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_visible_gpus", lambda: 8)
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr("seer.engine.vllm.version.require_vllm", lambda: "0.33.0")
    monkeypatch.setattr("seer.engine.vllm.fitting.minor_version", lambda: (0, 33))


def a_rollout(model: Path, hosting: HostingConfig, **settings: Any) -> Rollout:
    given: dict[str, Any] = {"engine": "vllm", "device": "cuda", "kv_blocks": 64, "max_num_seqs": 8, "instances": 2}
    rollout = Rollout(model, hosting=hosting, **given | settings)
    object.__setattr__(rollout.engine, "factory", "host_fakes:make_unlike")
    return rollout


def told(folder: Path, id: int) -> list[str]:
    """What each start of an instance's process wrote."""
    return (folder / f"instance-{id}.log").read_text().splitlines()


async def kill_and_wait(rollout: Rollout, id: int) -> None:
    os.kill(rollout.fleet.instances[id].pid or 0, signal.SIGKILL)
    while not rollout.fleet.num_lost:  # noqa: ASYNC110 - nothing says when it is noticed
        await asyncio.sleep(0.01)
    await asyncio.wait_for(rollout.fleet.wait_until_up(), 60)


def test_a_process_is_launched_and_restarted_with_its_own_settings(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(model, HostingConfig(log_dir=tmp_path), pool_bytes=64 << 20) as rollout:
            assert await rollout.add_instances(1, tensor_parallel=2, kv_blocks=128) == [2]
            assert await rollout.add_instances(1, max_num_seqs=3, gpus=[7]) == [3]
            assert await rollout.add_instances(1) == [4]
            await rollout.remove_instances([0])
            assert await rollout.add_instances(1, gpus="0") == [5]
            await kill_and_wait(rollout, 2)
            assert [(one.kv_blocks, one.max_num_seqs) for one in rollout.fleet.limits] == [
                (64, 8),
                (128, 8),
                (64, 3),
                (64, 8),
                (64, 8),
            ]

    asyncio.run(scenario())
    assert told(tmp_path, 1) == ["ranks 1, blocks 64, slots 8, GPUs 1, pool"]
    assert told(tmp_path, 2) == ["ranks 2, blocks 128, slots 8, GPUs 2,3, pool"] * 2
    assert told(tmp_path, 3) == ["ranks 1, blocks 64, slots 3, GPUs 7, pool"]
    assert told(tmp_path, 4) == ["ranks 1, blocks 64, slots 8, GPUs 4, pool"]
    assert told(tmp_path, 5) == ["ranks 1, blocks 64, slots 8, GPUs 0, pool"], "GPUs of one that left are free"


def test_what_does_not_fit_is_refused_before_a_process_starts(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(model, HostingConfig(log_dir=tmp_path)) as rollout:
            for own, why in (
                (
                    {"tensor_parallel": 8},
                    r"1 more instance needs 8 GPU\(s\), 6 of 8 are free \(2, 3, 4, 5, 6, 7\)",
                ),
                ({"gpus": [1]}, r"1 more instance needs 1 GPU\(s\), 0 of 1 are free"),
                ({"gpus": [8]}, "there is no GPU 8: 8 are visible"),
                ({"block_size": 32}, "'block_size' is no setting of single instances"),
            ):
                with pytest.raises(ConfigError, match=why):
                    await rollout.add_instances(1, **own)
            assert len(rollout.fleet.instances) == 2

    asyncio.run(scenario())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["instance-0.log", "instance-1.log"]


def test_kv_memory_that_the_others_leave_no_room_for_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "total_memory_bytes", lambda: 8 << 30)

    async def scenario() -> None:
        hosting = HostingConfig(pin_cores=False)
        given: dict[str, Any] = {"device": "cpu", "kv_blocks": None, "kv_memory_bytes": 2 << 30, "pool_bytes": 1 << 30}
        rollout = a_rollout(model, hosting, engine="local", **given)
        object.__setattr__(rollout.engine, "factory", "host_fakes:make_small")
        async with rollout:
            with pytest.raises(ConfigError, match=r"2 more instances, and 3\.0 GiB of this machine's 8\.0 GiB"):
                await rollout.add_instances(2, kv_memory_bytes=2 << 30)
            assert await rollout.add_instances(1, kv_memory_bytes=2 << 30) == [2]
            with pytest.raises(ConfigError, match=r"1 more instances, and 1\.0 GiB"):
                await rollout.add_instances(1)
            await rollout.remove_instances([0])
            assert await rollout.add_instances(1) == [3]

    asyncio.run(scenario())


def test_instances_whose_blocks_are_larger_than_the_pools_have_none_and_that_is_said(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def scenario() -> None:
        async with a_rollout(model, HostingConfig(log_dir=tmp_path), tensor_parallel=2) as rollout:
            assert await rollout.add_instances(1, tensor_parallel=4) == [2]
            assert "are computed again" not in caplog.text
            await rollout.remove_instances([2])
            assert await rollout.add_instances(1, tensor_parallel=1, gpus=[5]) == [3]

    asyncio.run(scenario())
    assert [told(tmp_path, id)[0].rpartition(", ")[2] for id in range(4)] == ["pool", "pool", "pool", "no pool"]
    assert "tensor_parallel=1 have KV blocks of" in caplog.text


class Asking(LocalLauncher):
    """Notes what each launch would ask of a cluster."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, dict[str, float]]] = []

    async def launch(self, id: int, spec: InstanceSpec, devices: InstanceDevices, options: HostingConfig) -> Child:
        self.asked.append((id, devices.needs.bundle()))
        return await super().launch(id, spec, devices, options)


class OnNodes(LocalHosting):
    """As if this machine were a cluster."""

    is_local = False

    def __init__(self) -> None:
        self.launcher = self.asking = Asking()


def test_ray_is_asked_for_the_gpus_of_each_instance_also_at_its_restart(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosting = OnNodes()
    monkeypatch.setattr(fleet, "make_hosting", lambda config, pool: hosting)

    async def scenario() -> None:
        async with a_rollout(model, HostingConfig(ray="auto"), instances=1) as rollout:
            assert await rollout.add_instances(1, tensor_parallel=4) == [1]
            with pytest.raises(ConfigError, match="gpus is of one machine"):
                await rollout.add_instances(1, gpus=[0])
            await kill_and_wait(rollout, 1)

    asyncio.run(scenario())
    one, four = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 4.0}
    assert hosting.asking.asked == [(0, one), (1, four), (1, four)]


def test_the_tokenizer_is_not_read_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = a_rollout(model, HostingConfig())
    monkeypatch.setattr("seer.engine.prepare._read_codec", lambda folder: pytest.fail("it was read again"))
    assert prepare_beside(rollout.engine, rollout._given).codec is rollout.engine.codec
