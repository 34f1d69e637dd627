# SPDX-License-Identifier: Apache-2.0
"""Sizes that this machine cannot hold are refused with the figure that fits, before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from seer import Rollout, Sampling
from seer.engine.local.tiny import make_tiny_model
from seer.errors import ConfigError
from seer.hosting import memory_limits
from seer.runs import encoded_check

MACHINE_BYTES = 8 << 30


@pytest.fixture(autouse=True)
def a_machine_of_8_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory_limits, encoded_check):
        monkeypatch.setattr(module, "total_memory_bytes", lambda: MACHINE_BYTES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"pool_bytes": MACHINE_BYTES + 1}, "--pool-memory 4294967296"),
        ({"instances": 3, "kv_memory_bytes": 3 << 30, "pool_bytes": 1 << 20}, "at most 2.7 GiB each would fit"),
        ({"instances": 1, "kv_memory_bytes": 7 << 30, "pool_bytes": 2 << 30}, "at most 6.0 GiB each would fit"),
        ({"instances": 1, "kv_blocks": 1 << 30}, "at most 8.0 GiB each would fit"),
    ],
)
def test_kv_memory_and_pools_beyond_the_machine_are_refused_with_what_fits(
    model: Path, settings: dict[str, Any], hint: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Rollout(model, **settings)
    assert "this machine has 8.0 GiB of memory" in str(refused.value)
    assert hint in str(refused.value.hint)


def test_what_just_fits_is_taken(model: Path) -> None:
    Rollout(model, instances=2, kv_memory_bytes=3 << 30, pool_bytes=2 << 30)


def test_more_responses_than_the_driver_has_memory_for_are_refused_with_what_fits(model: Path) -> None:
    rollout, prompts = Rollout(model, instances=1), [[1]] * 100
    most = MACHINE_BYTES // encoded_check.REQUEST_BYTES // 100
    with pytest.raises(ConfigError, match="this machine has memory for the state of about 4,194,304") as refused:
        rollout.encode(prompts, n=most + 1, sampling=Sampling(max_tokens=1))
    assert refused.value.hint == f"n={most:,} or less, or fewer prompts at once"
    assert len(rollout.encode(prompts, n=most, sampling=Sampling(max_tokens=1))) == 100
