# SPDX-License-Identifier: Apache-2.0
"""What a configuration makes of numbers, flags and paths: Python's own, or a refusal that names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from seer import HostingConfig, Rollout, Sampling
from seer.config import PoolConfig
from seer.errors import ConfigError

NUMPYS: dict[str, Any] = {
    "max_tokens": np.int64(5),
    "temperature": np.float64(0.7),
    "top_p": np.float32(0.5),
    "top_k": np.uint8(4),
    "stop_token_ids": (np.int64(2), 3),
}


def test_numbers_of_numpy_are_pythons_afterwards_and_can_be_sent() -> None:
    sampling = Sampling(**NUMPYS)
    assert sampling == Sampling(max_tokens=5, temperature=0.7, top_p=0.5, top_k=4, stop_token_ids=(2, 3))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=Sampling) == sampling


def test_a_rollout_takes_numbers_of_numpy() -> None:
    config = Rollout("none", engine="fake", instances=np.int64(2), kv_blocks=np.int32(8)).config  # type: ignore[arg-type]
    assert (type(config.instances), type(config.kv.blocks)) == (int, int)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("temperature", np.float64("nan"), "out of range"),
        ("temperature", np.float64(-1), "out of range"),
        ("max_tokens", np.int64(0), "out of range"),
        ("max_tokens", np.float64(2.5), "expected"),
        ("logprobs", 1, "expected `bool`"),
        ("ignore_eos", "no", "expected `bool`"),
        ("stop_token_ids", (np.float64(1.5),), "expected"),
    ],
)
def test_other_values_are_refused_by_name(field: str, value: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        Sampling(**{"max_tokens": 5, field: value})
    assert str(caught.value).startswith(f"{field}=")
    assert caught.value.hint


def test_a_path_may_be_given_as_text() -> None:
    assert HostingConfig(log_dir="logs").log_dir == Path("logs")  # type: ignore[arg-type]
    assert PoolConfig(ssd_dir="ssd").ssd_dir == Path("ssd")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="log_dir=3 is no path"):
        HostingConfig(log_dir=3)  # type: ignore[arg-type]
