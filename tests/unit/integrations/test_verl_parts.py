# SPDX-License-Identifier: Apache-2.0
"""The parts of the verl integration that need no verl: settings, sampling, gathering, engine arguments."""

from __future__ import annotations

import asyncio
import importlib.metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seer.config import VllmSpeculation
from seer.engine.local.tiny import make_tiny_model
from seer.engine.vllm import fitting
from seer.errors import ConfigError
from seer.integrations.verl.engine_settings import _ALWAYS, EngineSettings, refuse_own_arguments
from seer.integrations.verl.gathering import Gathering
from seer.integrations.verl.requests import GenerateRequest
from seer.integrations.verl.sampling import Lengths, sampling_of
from seer.integrations.verl.settings import VerlSettings, read_settings, refuse_unsupported
from seer.integrations.verl.version import require_verl
from seer.runs.response_handle import ResponseHandle
from seer.types import Sampling

LENGTHS = Lengths(prompt=16, response=96)
VERL_PARAMS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "logprobs": True,
}


class VerlConfig(SimpleNamespace):
    """A configuration of verl: attributes, and `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def rollout_config(**changed: Any) -> VerlConfig:
    values: dict[str, Any] = {
        "data_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "enable_rollout_routing_replay": False,
        "full_determinism": False,
        "logprobs_mode": "processed_logprobs",
        "repetition_penalty": 1.0,
    }
    return VerlConfig(**values | changed)


@pytest.mark.parametrize(
    ("version", "is_good"), [("0.9.1", True), ("0.9.7", True), ("0.8.0", False), ("0.10.0", False)]
)
def test_other_versions_of_verl_are_refused(monkeypatch: pytest.MonkeyPatch, version: str, is_good: bool) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    if is_good:
        require_verl()
    else:
        with pytest.raises(ConfigError, match=version):
            require_verl()


def test_settings_have_defaults_and_take_sections() -> None:
    assert read_settings(None) == VerlSettings()
    assert read_settings({"other": {}}) == VerlSettings()
    read = read_settings({"seer": {"chunk_tokens": 64, "pool": {"memory_bytes": "1GiB"}, "drafts": {"place": "gpu"}}})
    assert read.chunk_tokens == 64
    assert read.pool.memory_bytes == 1 << 30
    assert read.drafts == VllmSpeculation(place="gpu")


def test_an_unknown_setting_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"custom\.seer\.chunk_token") as caught:
        read_settings({"seer": {"chunk_token": 64}})
    assert "chunk_tokens" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="scheduler"):
        read_settings({"seer": {"scheduler": "fastest"}})


@pytest.mark.parametrize(
    "changed",
    [
        {"data_parallel_size": 2},
        {"enable_rollout_routing_replay": True},
        {"full_determinism": True},
        {"logprobs_mode": "raw_logprobs"},
        {"repetition_penalty": 1.1},
        {"disaggregation": SimpleNamespace(enabled=True)},
        {"mtp": SimpleNamespace(enable=True, enable_rollout=True)},
        {"enable_prefix_caching": False},
        {"router_config_path": "router.yaml"},
        {"scheduling_policy": "priority"},
    ],
)
def test_a_setting_of_verl_that_would_be_ignored_is_refused_by_its_name(changed: dict[str, Any]) -> None:
    refuse_unsupported(rollout_config(), VerlConfig())
    with pytest.raises(ConfigError, match=next(iter(changed))):
        refuse_unsupported(rollout_config(**changed), VerlConfig())


@pytest.mark.parametrize("name", [*_ALWAYS, "tensor_parallel_size", "block-size"])
def test_an_argument_of_vllm_that_would_be_overwritten_is_refused_by_its_name(name: str) -> None:
    refuse_own_arguments({"enable_prefix_caching": True, "max_num_batched_tokens": 64, "swap_space": 1}, "cuda")
    with pytest.raises(ConfigError, match=f"engine_kwargs.vllm.{name}=0") as caught:
        refuse_own_arguments({name: 0}, "cuda")
    assert caught.value.hint


def test_on_a_cpu_more_arguments_are_seers() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        refuse_own_arguments({"max_num_batched_tokens": 64}, "cpu")


def test_adapters_are_refused_unless_they_are_merged() -> None:
    with pytest.raises(ConfigError, match="lora"):
        refuse_unsupported(rollout_config(), VerlConfig(lora_rank=8, lora={}))
    with pytest.raises(ConfigError, match="lora"):  # loaded, and trained on
        refuse_unsupported(rollout_config(), VerlConfig(lora_rank=0, lora={}, lora_adapter_path="adapter"))
    refuse_unsupported(rollout_config(), VerlConfig(lora_rank=8, lora={"merge": True}))


@pytest.mark.parametrize(
    ("device", "own", "vllm", "place"),
    [
        ("cuda", {}, (0, 26), "gpu"),
        ("cuda", {}, (0, 31), None),
        ("cuda", {"drafts": {"place": "gpu"}}, (0, 31), "gpu"),
        ("cuda", {"speculation": "off"}, (0, 26), None),
        ("cpu", {}, (0, 31), "scheduler"),
    ],
)
def test_drafts_on_gpus_are_the_default_where_they_are_seers_anywhere(
    device: str,
    own: dict[str, Any],
    vllm: tuple[int, int],
    place: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fitting, "minor_version", lambda: vllm)
    model = VerlConfig(local_path=str(make_tiny_model(tmp_path / "tiny")))
    values = {"custom": {"seer": own}, "engine_kwargs": {}, "tensor_model_parallel_size": 1, "dtype": "bfloat16"}
    engine = EngineSettings(rollout_config(**values), model, device)
    assert (engine.drafts and engine.drafts.place) == place
    assert engine.needs().drafts == (place is not None)


def test_sampling_is_what_verl_says() -> None:
    sampling = sampling_of(VERL_PARAMS, 10, LENGTHS, ignore_eos=False)
    assert sampling == Sampling(max_tokens=96, temperature=0.7, top_p=0.9)
    assert sampling_of({**VERL_PARAMS, "top_k": 5, "stop_token_ids": [3]}, 10, LENGTHS, ignore_eos=True) == Sampling(
        max_tokens=96, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(3,), ignore_eos=True
    )


@pytest.mark.parametrize(
    ("given", "num_prompt_tokens", "allowed"),
    [
        ({}, 10, 96),
        ({}, 16, 96),
        ({}, 60, 52),  # a later turn: what is left of prompt and response together
        ({}, 200, 1),
        ({"max_tokens": 7}, 60, 7),
        ({"max_new_tokens": 8}, 60, 8),
    ],
)
def test_the_length_limit_is_the_one_that_verl_derives(
    given: dict[str, int], num_prompt_tokens: int, allowed: int
) -> None:
    assert sampling_of({**VERL_PARAMS, **given}, num_prompt_tokens, LENGTHS, ignore_eos=False).max_tokens == allowed


def test_a_sampling_parameter_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(ConfigError, match="'stop'"):
        sampling_of({**VERL_PARAMS, "stop": ["\n"]}, 10, LENGTHS, ignore_eos=False)
    with pytest.raises(ConfigError, match="repetition_penalty"):
        sampling_of({**VERL_PARAMS, "repetition_penalty": 1.2}, 10, LENGTHS, ignore_eos=False)


def asked(group: str, num_siblings: int) -> GenerateRequest:
    return GenerateRequest(group=group, num_siblings=num_siblings, prompt=(1,), sampling=Sampling(max_tokens=4))


def test_siblings_are_submitted_together_and_others_apart() -> None:
    submitted: list[tuple[str, int]] = []

    def submit(request: GenerateRequest, n: int) -> list[ResponseHandle]:
        submitted.append((request.group, n))
        return [ResponseHandle(request.group, None) for _ in range(n)]

    async def work() -> None:
        gathering = Gathering(submit)
        calls = [gathering.join(asked("a", 3)) for _ in range(3)]
        calls += [gathering.join(asked("b", 4)) for _ in range(2)]  # two siblings do not come in time
        handles = await asyncio.gather(*calls)
        assert len(set(map(id, handles))) == 5

    asyncio.run(work())
    assert submitted == [("a", 3), ("b", 2)]


def test_a_refused_submission_fails_every_sibling() -> None:
    def refuse(request: GenerateRequest, n: int) -> list[ResponseHandle]:
        raise ConfigError("too long")

    async def work() -> None:
        gathering = Gathering(refuse)
        answers = await asyncio.gather(*(gathering.join(asked("a", 2)) for _ in range(2)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [ConfigError, ConfigError]

    asyncio.run(work())
