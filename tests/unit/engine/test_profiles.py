# SPDX-License-Identifier: Apache-2.0
"""A rollout starts with the step profile of its model, device and engine, and with no other."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from seer.cli.main import main
from seer.config import LocalEngineConfig, RolloutConfig
from seer.engine import profiles
from seer.engine.local.tiny import make_tiny_model
from seer.engine.prepare import prepare
from seer.engine.profiles import find_profile
from seer.speculation.step_profile import StepProfile


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def profile(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `seer profile` leaves in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["profile", str(model), "--batches", "1,2", "--tokens", "1,3", "--contexts", "16", "--steps", "2"]
    assert main(arguments) == 0
    (written,) = (tmp_path / "seer" / "profiles").iterdir()
    return written


def config_of(model: Path, **settings: Any) -> RolloutConfig:
    return prepare(RolloutConfig(model=str(model), **settings)).config


def test_what_seer_profile_writes_is_found_by_a_rollout_of_the_same_model(model: Path, profile: Path) -> None:
    assert find_profile(config_of(model)) == profile
    assert find_profile(config_of(model, dtype="float32", instances=2)) == profile
    assert {point.num_requests for point in StepProfile.load(profile).points} == {1, 2}


def test_new_weights_of_the_same_shape_have_the_same_costs(model: Path, profile: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=5)
    assert find_profile(config_of(other)) == profile


def test_another_model_type_device_or_engine_has_another_profile(
    model: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = make_tiny_model(tmp_path / "wider", num_hidden_layers=3)
    assert find_profile(config_of(wider)) is None
    assert find_profile(config_of(model, dtype="bfloat16")) is None
    assert find_profile(_threads(model, 2)) is None
    assert find_profile(RolloutConfig(model=str(model), engine="fake").fitted()) is None
    monkeypatch.setattr(profiles, "_cpu_name", lambda: "another CPU")
    assert find_profile(config_of(model)) is None


def _threads(model: Path, threads: int) -> RolloutConfig:
    config = config_of(model)
    assert isinstance(config.engine_settings, LocalEngineConfig)
    return replace(config, engine_settings=replace(config.engine_settings, threads=threads))


def test_an_instance_starts_with_the_profile_that_its_driver_found(model: Path, profile: Path) -> None:
    from seer.config import plain_values
    from seer.drafting.curve_keys import make_keys
    from seer.engine.instance_settings import InstanceSettings
    from seer.engine.local.hosted import make_local
    from seer.metrics.events import discard

    config = config_of(model)
    for path, is_known in ((str(profile), True), (None, False)):
        given = InstanceSettings(config=config, draft_servers=(), draft_keys=make_keys()[1], step_profile=path)
        budget = make_local(0, plain_values(given), discard)._budget
        assert budget is not None
        assert budget._cost.is_known == is_known


def test_a_profile_of_other_versions_is_ignored_with_one_line(
    model: Path, profile: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replace(StepProfile.load(profile), versions="seer-rollout 0.0.1").save(profile)
    with caplog.at_level(logging.WARNING):
        assert find_profile(config_of(model)) is None
    (line,) = caplog.messages
    assert "was measured with seer-rollout 0.0.1" in line


def test_a_profile_that_cannot_be_read_is_ignored_with_one_line(
    model: Path, profile: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile.write_text("{")
    with caplog.at_level(logging.WARNING):
        assert find_profile(config_of(model)) is None
    (line,) = caplog.messages
    assert "is not JSON" in line
