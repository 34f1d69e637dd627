# SPDX-License-Identifier: Apache-2.0
"""A configuration written as TOML, or sent to a process, comes back equal."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seer.config import (
    PRESETS,
    CompareConfig,
    FakeEngineConfig,
    HostingConfig,
    KvConfig,
    LocalEngineConfig,
    PoolConfig,
    RolloutConfig,
    RunConfig,
    TransferOptions,
    VllmEngineConfig,
    VllmSpeculation,
    build_run,
    plain_values,
    preset,
    read_config_file,
    to_toml,
)
from seer.errors import ConfigError, InputError
from seer.types import LEAST_TEMPERATURE, Sampling

COUNTS = st.integers(1, 128)  # within the range of every count
SECONDS = st.floats(2.0, 1e6, allow_nan=False)
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
PATHS = WORDS.filter(lambda word: "\x00" not in word).map(Path)
SHARES = st.floats(0.001, 1.0)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


SPECULATIONS = st.builds(
    VllmSpeculation,
    max_draft_tokens=st.integers(1, 128),
    padding=st.sampled_from(["none", "drafted", "always"]),
    fixed_tokens=maybe(COUNTS),
)
ENGINES: dict[str, st.SearchStrategy[Any]] = {
    "local": st.builds(LocalEngineConfig, max_step_tokens=maybe(COUNTS), threads=COUNTS, memory_share=maybe(SHARES)),
    "vllm": st.builds(
        VllmEngineConfig,
        stream_tokens=COUNTS,
        speculation=maybe(SPECULATIONS),
        pool_options=st.builds(TransferOptions, load_async=st.booleans(), save_wait_s=SECONDS),
        engine=st.dictionaries(WORDS, COUNTS | SECONDS | WORDS | st.booleans(), max_size=3),
    ),
    "fake": st.builds(FakeEngineConfig, step_s=SECONDS),
}


@st.composite
def rollouts(draw: st.DrawFn) -> RolloutConfig:
    engine = draw(st.sampled_from(sorted(ENGINES)))
    return RolloutConfig(
        model=draw(WORDS),
        instances=draw(COUNTS),
        engine=typing.cast(Any, engine),
        device=draw(st.sampled_from(["cpu", "cuda", "cuda:3"])),
        dtype=draw(st.sampled_from(["auto", "float16"])),
        max_num_seqs=draw(maybe(COUNTS)),
        max_model_len=draw(maybe(COUNTS)),
        scheduler=draw(st.sampled_from(["seer", "verl"])),
        speculation=draw(st.sampled_from(["auto", "off"])),
        chunk_tokens=draw(maybe(COUNTS)),
        kv=draw(st.builds(KvConfig, memory_bytes=maybe(COUNTS), blocks=maybe(COUNTS), block_size=COUNTS)),
        pool=draw(
            st.builds(
                PoolConfig,
                backend=st.sampled_from(["local", "mooncake", "none"]),
                memory_bytes=maybe(st.integers(0, 1 << 40)),
                name=st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
            )
        ),
        hosting=draw(
            st.builds(
                HostingConfig, pin_cores=maybe(st.booleans()), silence_deadline_s=maybe(SECONDS), log_dir=maybe(PATHS)
            )
        ),
        engine_settings=draw(maybe(ENGINES[engine])),
    )


RUNS = st.builds(
    RunConfig,
    prompts=maybe(PATHS),
    n=COUNTS,
    limit=maybe(COUNTS),
    skip_bad=st.booleans(),
    seed=st.integers(0, (1 << 63) - 1),
    verify=maybe(SHARES),
    out=maybe(PATHS),
    run_dir=maybe(PATHS),
    sampling=st.builds(
        Sampling,
        max_tokens=COUNTS,
        temperature=st.just(0.0) | st.floats(LEAST_TEMPERATURE, 10),
        top_p=SHARES,
        top_k=maybe(COUNTS),
        stop_token_ids=st.lists(COUNTS, max_size=3).map(tuple),
        min_p=st.floats(0, 1),
        min_tokens=st.just(0),
        ignore_eos=st.booleans(),
    ),
    compare=st.builds(
        CompareConfig,
        schedulers=st.lists(st.sampled_from(["seer", "verl", "verl-sync"]), min_size=1).map(tuple),
        repeat=COUNTS,
        lengths=WORDS,
    ),
    rollout=rollouts(),
)


@settings(deadline=None, max_examples=150)
@given(RUNS)
def test_a_configuration_written_as_toml_is_read_back_equal(config: RunConfig) -> None:
    assert build_run(tomllib.loads(to_toml(config))) == config
    assert build_run(tomllib.loads(to_toml(config.fitted()))) == config.fitted()


@settings(deadline=None, max_examples=50)
@given(RUNS)
def test_plain_values_survive_a_process_boundary(config: RunConfig) -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plain_values(config)))
    assert build_run(sent) == config


def sections(kind: Any) -> set[Any]:
    """The dataclasses of the tree below one."""
    found = {kind}
    for hint in typing.get_type_hints(kind).values():
        for option in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(option):
                found |= sections(option)
    return found


@pytest.mark.parametrize("kind", sorted(sections(RunConfig), key=str))
def test_a_field_that_may_be_none_is_none_by_default_since_toml_has_no_null(kind: Any) -> None:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if type(None) in typing.get_args(hints[field.name]):
            assert field.default is None, field.name
    assert kind.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(kind))


def test_a_file_is_laid_over_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[rollout]\nmodel = "org/name"\n[rollout.hosting]\nmax_restarts = 1\n')
    config = read_config_file(path, base=preset("one-gpu"))
    assert (config.rollout.model, config.rollout.device, config.sampling.max_tokens) == ("org/name", "cuda", 4096)
    assert config.rollout.fitted().hosting == HostingConfig(max_restarts=1).fitted("cuda")


def test_a_file_with_a_mistake_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[rollout]\ninstancs = 2\n")
    with pytest.raises(ConfigError, match=f"{path}: unknown key rollout.instancs") as caught:
        read_config_file(path)
    assert caught.value.hint == "did you mean instances?"
    path.write_text("[rollout\n")
    with pytest.raises(InputError, match=f"{path} is not TOML"):
        read_config_file(path)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_config_file(tmp_path / "absent.toml")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_their_devices(name: str) -> None:
    rollout = preset(name).rollout.fitted()
    on_cpu = rollout.device == "cpu"
    assert rollout.max_num_seqs == (16 if on_cpu else 256)
    assert rollout.hosting.pin_cores is on_cpu
    assert rollout.instances == {"cpu-demo": 2, "one-gpu": 1, "eight-gpus": 8}[name]


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'one-gpus'") as caught:
        preset("one-gpus")
    assert caught.value.hint == "did you mean one-gpu?"
