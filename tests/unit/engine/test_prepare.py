"""What a user sets reaches the process of an instance, on whatever device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from seer import HostOptions, Rollout
from seer.cli.main import build_parser
from seer.cli.rollout_options import fleet_settings
from seer.engine.local import LocalInstance
from seer.engine.local.tiny import make_tiny_model
from seer.engine.prepare import GPU_KV_SHARE, InstanceSettings, prepare


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def instance_settings(model: Path, **settings: Any) -> dict[str, Any]:
    return prepare("local", model, InstanceSettings(**settings)).spec.settings


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_device_type_and_kv_memory_reach_the_instance(model: Path, device: str) -> None:
    found = instance_settings(model, device=device, dtype="bfloat16", kv_memory_bytes=1 << 20, max_num_seqs=7)
    assert (found["device"], found["dtype"], found["kv_memory_bytes"], found["max_num_seqs"]) == (
        device,
        "bfloat16",
        1 << 20,
        7,
    )


def test_instances_on_one_gpu_share_its_free_memory(model: Path) -> None:
    shares = [instance_settings(model, device="cuda", num_instances=n)["memory_share"] for n in (1, 4)]
    assert shares == [pytest.approx(GPU_KV_SHARE), pytest.approx(GPU_KV_SHARE / 4)]
    assert "memory_share" not in instance_settings(model, num_instances=4)


def test_the_share_decides_how_much_kv_an_instance_takes(model: Path) -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 10**6, "max_step_tokens": 10**6, "block_size": 4}
    few, many = (LocalInstance(0, model, memory_share=share, **sizes).limits.kv_blocks for share in (0.001, 0.01))
    assert many == pytest.approx(10 * few, rel=0.5)  # other processes take and free memory at the same time


@pytest.mark.parametrize(("device", "value_bytes"), [("cpu", 4), ("cuda", 2)])
def test_the_pool_s_blocks_have_the_size_of_the_device_s_type(model: Path, device: str, value_bytes: int) -> None:
    whole = prepare("local", model, InstanceSettings(device=device)).block_bytes
    half = prepare("local", model, InstanceSettings(device=device, dtype="float16")).block_bytes
    assert whole is not None
    assert half is not None
    assert whole == half * value_bytes // 2


@pytest.mark.parametrize(("device", "pinned"), [("cpu", True), ("cuda", False)])
def test_only_cpu_instances_are_pinned_to_one_core_and_thread(model: Path, device: str, pinned: bool) -> None:
    assert Rollout(model, device=device).fleet._options.pin is pinned
    args = build_parser().parse_args(["rollout", "--model", str(model), "--device", device, "--kv-memory", "1MiB"])
    settings = fleet_settings(args, None)
    hosting = settings["hosting"]
    assert isinstance(hosting, HostOptions)
    assert (hosting.pin, settings["device"], settings["kv_memory_bytes"]) == (pinned, device, 1 << 20)
    assert (hosting.silence_deadline_s > 30) == (device == "cuda")  # kernels are compiled with the interpreter held
