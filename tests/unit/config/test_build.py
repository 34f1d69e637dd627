# SPDX-License-Identifier: Apache-2.0
"""Configurations from plain values: layers, unknown keys, wrong types."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seer.config import (
    HostingConfig,
    KvConfig,
    PoolConfig,
    RolloutConfig,
    RolloutKeywords,
    RunConfig,
    VllmEngineConfig,
    VllmSpeculation,
    build_run,
    from_keywords,
    of_new_instances,
)
from seer.config.keywords import SHORT_NAMES, InstanceKeywords
from seer.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"promts": "p"}, "unknown key promts", "did you mean prompts?"),
        ({"rollout": {"instnces": 2}}, "unknown key rollout.instnces", "did you mean instances?"),
        ({"rollout": {"kv": {"block_sise": 1}}}, "unknown key rollout.kv.block_sise", "did you mean block_size?"),
        ({"sampling": {"zzz": 1}}, "unknown key sampling.zzz", "one of max_tokens, temperature"),
        (
            {"rollout": {"engine_settings": {"step_s": 1.0}}},
            "unknown key rollout.engine_settings.step_s",
            "did you mean max_step_tokens?",
        ),
        (
            {"rollout": {"engine": "vllm", "engine_settings": {"speculation": {"paddin": "none"}}}},
            "unknown key rollout.engine_settings.speculation.paddin",
            "did you mean padding?",
        ),
        ({"rollout": {"engine": "vlm"}}, "unknown engine 'vlm'", "did you mean vllm?"),
    ],
)
def test_an_unknown_key_is_refused_with_its_file_and_the_nearest_name(
    values: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_run(values, source="run.toml")
    assert str(caught.value) == f"run.toml: {message}"
    assert str(caught.value.hint).startswith(hint)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": "8"}, "n='8': expected `int`, got `str`"),
        ({"rollout": {"instances": 1.5}}, r"rollout.instances=1.5: expected `int`, got `float`"),
        ({"rollout": {"pool": "none"}}, "rollout.pool='none' is not a section"),
        ({"rollout": {"kv": None}}, "rollout.kv=None is not a section"),
        ({"n": True}, "n=True: expected `int`, got `bool`"),
        ({"sampling": {"max_tokens": 0}}, "max_tokens=0 is out of range"),
        ({"rollout": {"device": "gpu"}}, "device='gpu'"),
        ({"rollout": {"scheduler": "sear"}}, "unknown scheduler"),
        ({"verify": 2.0}, "verify=2"),
        ({"compare": {"schedulers": []}}, "compare.schedulers is empty"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_file_and_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: ") as caught:
        build_run(values, source="run.toml")
    assert message in str(caught.value)


def test_sizes_may_have_units() -> None:
    values = {"rollout": {"kv": {"memory_bytes": "512MiB"}, "pool": {"memory_bytes": 7}}}
    config = build_run(values).rollout
    assert (config.kv.memory_bytes, config.pool.memory_bytes) == (512 << 20, 7)
    with pytest.raises(ConfigError, match="is not a size"):
        build_run({"rollout": {"kv": {"memory_bytes": "lots"}}})


def test_later_layers_keep_what_they_do_not_set() -> None:
    first = build_run({"n": 4, "sampling": {"max_tokens": 64}, "rollout": {"kv": {"block_size": 32}}})
    second = build_run({"sampling": {"temperature": 0}, "rollout": {"kv": {"blocks": 7}}}, base=first)
    assert (second.n, second.sampling.max_tokens, second.sampling.temperature) == (4, 64, 0.0)
    assert second.rollout.kv == KvConfig(blocks=7, block_size=32)
    assert second.rollout.model == RunConfig().rollout.model


def test_keywords_make_the_same_configuration_as_sections() -> None:
    short = from_keywords("m", {"instances": 2, "kv_blocks": 8, "block_size": 4, "pool": "none", "pool_bytes": 3})
    whole = RolloutConfig(
        model="m", instances=2, kv=KvConfig(blocks=8, block_size=4), pool=PoolConfig(backend="none", memory_bytes=3)
    )
    assert short == whole
    assert from_keywords("m", {"pool": PoolConfig(name="x"), "pool_bytes": 3}).pool == PoolConfig(
        name="x", memory_bytes=3
    )
    assert from_keywords("m", {"hosting": {"log_dir": "logs"}}).hosting == HostingConfig(log_dir=Path("logs"))
    speculation = from_keywords("m", {"engine": "vllm", "engine_settings": {"speculation": {"max_draft_tokens": 4}}})
    assert speculation.engine_settings == VllmEngineConfig(speculation=VllmSpeculation(max_draft_tokens=4))


def test_an_unknown_keyword_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'max_num_seq'") as caught:
        from_keywords("m", {"max_num_seq": 3})
    assert caught.value.hint == "did you mean max_num_seqs?"


@pytest.mark.parametrize("pool", [3, None])
def test_a_keyword_that_is_no_section_is_refused(pool: Any) -> None:
    with pytest.raises(ConfigError, match=r"pool=(3|None) is not a section"):
        from_keywords("m", {"pool": pool, "pool_bytes": 1})


def test_settings_of_another_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match="engine_settings is a VllmEngineConfig, and engine is 'local'"):
        RolloutConfig(model="m", engine_settings=VllmEngineConfig())
    with pytest.raises(ConfigError, match="VllmEngineConfig"):
        from_keywords("m", {"engine_settings": VllmEngineConfig()})


def test_the_typed_keywords_are_the_fields_and_the_short_names() -> None:
    fields = {field.name for field in dataclasses.fields(RolloutConfig)} - {"model"}
    assert set(RolloutKeywords.__annotations__) == fields | set(SHORT_NAMES)


ON_A_GPU = RolloutConfig(model="m", engine="vllm", device="cuda:1", kv=KvConfig(memory_bytes=9, block_size=32))


def test_new_instances_have_settings_of_their_own_and_the_rest_of_the_rollout() -> None:
    own = of_new_instances(ON_A_GPU, {"tensor_parallel": 2, "kv_blocks": 7, "max_num_seqs": 3, "gpus": "0,2"})
    assert own == dataclasses.replace(
        ON_A_GPU, tensor_parallel=2, kv=KvConfig(blocks=7, block_size=32), max_num_seqs=3, gpus=(0, 2), device="cuda"
    )
    assert of_new_instances(own, {"kv_memory_bytes": "1GiB"}).kv == KvConfig(memory_bytes=1 << 30, block_size=32)
    assert of_new_instances(own, dict.fromkeys(InstanceKeywords.__annotations__)) == own


@pytest.mark.parametrize(
    ("config", "keywords", "why", "hint"),
    [
        (ON_A_GPU, {"dtype": "bfloat16"}, "'dtype' is no setting of single instances", "tensor_parallel, "),
        (ON_A_GPU, {"tensor_paralel": 2}, "'tensor_paralel' is no setting", "tensor_parallel, "),
        (ON_A_GPU, {"tensor_parallel": 0}, "tensor_parallel=0 is out of range", "use 1 to "),
        (ON_A_GPU, {"tensor_parallel": "2"}, "tensor_parallel='2'", "use 1 to "),
        (ON_A_GPU, {"kv_blocks": -1}, "blocks=-1 is out of range", "use 1 to "),
        (ON_A_GPU, {"kv_blocks": 7, "kv_memory_bytes": 7}, "kv_memory_bytes=7 and kv_blocks=7", "give one"),
        (ON_A_GPU, {"max_num_seqs": 1.5}, "max_num_seqs=1.5", "use 1 to "),
        (ON_A_GPU, {"gpus": [0, 0]}, "gpus='0,0'", "each GPU once"),
        (RolloutConfig(model="m"), {"tensor_parallel": 2}, "engine 'local' runs on one device", "engine='vllm'"),
        (RolloutConfig(model="m"), {"gpus": [0]}, "device='cpu'", "device='cuda'"),
        (RolloutConfig(model="m", hosting=HostingConfig(ray="auto")), {"gpus": [0]}, "gpus", "device='cuda'"),
        (
            RolloutConfig(model="m", device="cuda", hosting=HostingConfig(ray="auto")),
            {"gpus": [0]},
            "gpus is of one machine",
            "Ray places each instance",
        ),
    ],
)
def test_settings_that_new_instances_cannot_have_are_refused(
    config: RolloutConfig, keywords: dict[str, Any], why: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        of_new_instances(config, keywords)
    assert why in str(refused.value)
    assert hint in str(refused.value.hint)


def test_the_configuration_is_light() -> None:
    code = "import seer.config, sys; print([name for name in ('torch', 'vllm', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
