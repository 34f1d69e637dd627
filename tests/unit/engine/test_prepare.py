# SPDX-License-Identifier: Apache-2.0
"""What a user sets reaches the process of an instance, on whatever device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from seer import HostingConfig, Rollout, Sampling
from seer.cli.main import build_parser
from seer.cli.run_config import read_run
from seer.config import KvConfig, LocalEngineConfig, RolloutConfig, VllmEngineConfig, plain_values
from seer.engine.instance_settings import InstanceSettings, read_settings
from seer.engine.local import LocalInstance
from seer.engine.local.hosted import make_local
from seer.engine.local.model_config import read_config
from seer.engine.local.tiny import make_tiny_model
from seer.engine.prepare import GPU_KV_SHARE, VLLM_GPU_SHARE, PreparedEngine, prepare
from seer.errors import ConfigError, InputError
from seer.metrics.events import discard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def prepared(model: Path, **settings: Any) -> PreparedEngine:
    return prepare(RolloutConfig(model=str(model), **settings))


def sent(engine: PreparedEngine) -> InstanceSettings:
    """What the process of an instance reads from what it is sent."""
    return read_settings(plain_values(InstanceSettings(config=engine.config)))


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_the_whole_configuration_reaches_the_instance_s_process(model: Path, device: str) -> None:
    kv = KvConfig(memory_bytes=1 << 20)
    engine = prepared(model, device=device, dtype="bfloat16", kv=kv, max_num_seqs=7)
    assert sent(engine).config == engine.config
    found = sent(engine).config
    assert (found.device, found.dtype, found.kv.memory_bytes, found.max_num_seqs) == (device, "bfloat16", 1 << 20, 7)
    assert found.model == str(model)


def test_an_instance_is_made_of_the_configuration(model: Path) -> None:
    own = LocalEngineConfig(max_step_tokens=64, stream_tokens=3)
    engine = prepared(model, kv=KvConfig(blocks=9, block_size=8), max_num_seqs=5, engine_settings=own)
    instance = make_local(0, plain_values(InstanceSettings(config=engine.config)), discard)
    assert (instance.limits.kv_blocks, instance.limits.block_size, instance.limits.max_num_seqs) == (9, 8, 5)
    chosen = instance.inner._settings
    assert (chosen.max_step_tokens, chosen.stream_tokens) == (64, 3)


@pytest.mark.parametrize("without_eos", [False, True])
def test_sampling_that_leaves_no_token_is_refused_and_ends_no_run(model: Path, without_eos: bool) -> None:
    engine = prepared(model, instances=1)
    assert engine.vocab_size is not None
    assert engine.refuse_sampling is not None
    [eos] = read_config(model).eos_token_ids
    ends = tuple(token for token in range(engine.vocab_size) if not (without_eos and token == eos))
    engine.refuse_sampling(Sampling(max_tokens=4, stop_token_ids=ends))
    if without_eos:
        engine.refuse_sampling(Sampling(max_tokens=4, min_tokens=1, stop_token_ids=ends, ignore_eos=True))
    with pytest.raises(InputError, match="every token of the vocabulary ends a response"):
        engine.refuse_sampling(Sampling(max_tokens=4, min_tokens=1, stop_token_ids=ends))


def test_a_gpu_runs_more_requests_at_once_than_a_cpu(model: Path) -> None:
    assert [prepared(model, device=device).config.max_num_seqs for device in ("cpu", "cuda")] == [16, 256]
    assert prepared(model, device="cuda", max_num_seqs=3).config.max_num_seqs == 3


def test_instances_on_one_gpu_share_its_free_memory(model: Path) -> None:
    def share(**settings: Any) -> float | None:
        found = prepared(model, **settings).config.engine_settings
        assert isinstance(found, LocalEngineConfig)
        return found.memory_share

    assert share(device="cuda") == pytest.approx(GPU_KV_SHARE)
    assert share(device="cuda", instances=4) == pytest.approx(GPU_KV_SHARE)  # each has its own
    assert share(device="cuda", instances=4, share_gpus=True) == pytest.approx(GPU_KV_SHARE / 4)
    assert share(device="cuda", instances=4, share_gpus=True, gpus=(0, 1)) == pytest.approx(GPU_KV_SHARE / 2)
    assert share(instances=4) is None


def test_vllm_instances_on_one_gpu_share_its_memory(model: Path) -> None:
    pytest.importorskip("vllm")

    def arguments(instances: int, **settings: Any) -> dict[str, Any]:
        engine = prepared(model, engine="vllm", device="cuda", instances=instances, share_gpus=True, **settings)
        assert isinstance(engine.config.engine_settings, VllmEngineConfig)
        return engine.config.engine_settings.engine

    name = "gpu_memory_utilization"
    assert arguments(1) == {}  # vLLM's own default
    assert arguments(3)[name] == pytest.approx(VLLM_GPU_SHARE / 3)
    assert arguments(4, tensor_parallel=2, gpus=(0, 1, 2, 3))[name] == pytest.approx(VLLM_GPU_SHARE / 2)
    assert arguments(3, kv=KvConfig(blocks=8)) == {}
    assert arguments(3, engine_settings=VllmEngineConfig(engine={name: 0.1}))[name] == 0.1


@pytest.mark.parametrize("engine", ["local", "vllm"])
def test_new_weights_can_stay_on_the_gpu_of_either_engine(model: Path, engine: str) -> None:
    pytest.importorskip("vllm")
    opens = [prepared(model, engine=engine, device=device).opens_gpu_handles for device in ("cpu", "cuda")]
    assert opens == [False, True]


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_arguments_that_spread_an_engine_are_not_passed_by(model: Path, name: str) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match=name):
        prepared(model, engine="vllm", engine_settings=VllmEngineConfig(engine={name: 2}))


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ({"max_num_seqs": 4}, "set max_num_seqs of the rollout"),
        ({"speculative_config": {"method": "ngram"}}, "set engine_settings.speculation"),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "set pool of the rollout"),
        ({"logprobs_mode": "raw_logits"}, "the distribution that was sampled from"),
        ({"scheduler_cls": "a.B"}, "Seer has its own"),
        ({"enable_lora": True}, "merge the adapter"),
        ({"max_lora_rank": 8}, "merge the adapter"),
        ({"enable_chunked_prefill": True}, "on a CPU"),
        ({"decode_context_parallel_size": 2}, "pool = 'none'"),
        ({"hf_overrides": object()}, "reach the instance's process"),
        ({"gpu_memory_utilisation": 0.5}, "did you mean gpu_memory_utilization?"),
        ({"no such thing": 1}, "vllm serve --help"),
    ],
)
def test_arguments_of_vllm_that_cannot_be_followed_are_refused_before_anything_starts(
    model: Path, argument: dict[str, Any], why: str
) -> None:
    pytest.importorskip("vllm")
    (name,) = argument
    with pytest.raises(ConfigError, match=name) as refused:
        prepared(model, engine="vllm", instances=2, engine_settings=VllmEngineConfig(engine=argument))
    assert why in str(refused.value.hint)


@pytest.mark.parametrize(
    "argument",
    [
        {"gpu_memory_utilization": 0.3},
        {"distributed_executor_backend": "uni"},
        {"enable_expert_parallel": True},
        {"quantization": "fp8", "kv_cache_dtype": "fp8", "enforce_eager": True, "load_format": "dummy"},
        {"decode_context_parallel_size": 1},
        {"enable_chunked_prefill": False},
    ],
)
def test_other_arguments_reach_vllm_as_they_are(model: Path, argument: dict[str, Any]) -> None:
    pytest.importorskip("vllm")
    engine = prepared(model, engine="vllm", instances=2, engine_settings=VllmEngineConfig(engine=argument))
    assert isinstance(engine.config.engine_settings, VllmEngineConfig)
    assert engine.config.engine_settings.engine == argument


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "why"),
    [
        (3, 4, 2, "does not divide the model's 4 attention heads"),
        (6, 12, 4, "6 and 4 KV heads"),
        (8, 4, 2, "8 does not"),
    ],
)
def test_ranks_among_which_heads_cannot_be_divided_are_refused(
    tmp_path: Path, ranks: int, heads: int, kv_heads: int, why: str
) -> None:
    pytest.importorskip("vllm")
    made = make_tiny_model(tmp_path / "m", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=32)
    with pytest.raises(ConfigError, match=why):
        prepared(made, engine="vllm", tensor_parallel=ranks)
    for fitting in (1, 2, 4):
        assert prepared(made, engine="vllm", tensor_parallel=fitting).config.tensor_parallel == fitting


def test_each_rank_holds_its_part_of_a_block(model: Path) -> None:
    pytest.importorskip("vllm")
    whole, half = (prepared(model, engine="vllm", tensor_parallel=ranks).block_bytes for ranks in (1, 2))
    assert whole is not None
    assert half == whole // 2


def test_the_share_decides_how_much_kv_an_instance_takes(model: Path) -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 10**6, "max_step_tokens": 10**6, "block_size": 4}
    few, many = (LocalInstance(0, model, memory_share=share, **sizes).limits.kv_blocks for share in (0.001, 0.01))
    assert many == pytest.approx(10 * few, rel=0.5)  # other processes take and free memory at the same time


@pytest.mark.parametrize(("device", "value_bytes"), [("cpu", 4), ("cuda", 2)])
def test_the_pool_s_blocks_have_the_size_of_the_device_s_type(model: Path, device: str, value_bytes: int) -> None:
    whole = prepared(model, device=device).block_bytes
    half = prepared(model, device=device, dtype="float16").block_bytes
    assert whole is not None
    assert half is not None
    assert whole == half * value_bytes // 2


@pytest.mark.parametrize(("device", "pinned"), [("cpu", True), ("cuda", False)])
def test_only_cpu_instances_are_pinned_to_one_core_and_thread(model: Path, device: str, pinned: bool) -> None:
    assert Rollout(model, device=device).config.hosting.pin_cores is pinned
    some = HostingConfig(max_restarts=1)  # setting one field leaves the others to the device
    assert Rollout(model, device=device, hosting=some).fleet._options.pin_cores is pinned
    args = build_parser().parse_args(["rollout", "--model", str(model), "--device", device, "--kv-memory", "1MiB"])
    config = read_run(args).fitted().rollout
    assert (config.hosting.pin_cores, config.device, config.kv.memory_bytes) == (pinned, device, 1 << 20)
    silence_s = config.hosting.silence_deadline_s
    assert silence_s is not None
    assert (silence_s > 30) == (device == "cuda")  # kernels are compiled with the interpreter held
