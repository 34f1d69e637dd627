# SPDX-License-Identifier: Apache-2.0
"""Configurations for common machines, to start from: `--preset NAME`."""

from __future__ import annotations

from dataclasses import dataclass

from seer.config.nearest import nearest
from seer.config.rollout import RolloutConfig
from seer.config.run import CompareConfig, RunConfig
from seer.errors import ConfigError
from seer.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named configuration."""

    about: str
    """One line for `--help`."""
    config: RunConfig


PRESETS = {
    "cpu-demo": Preset(
        about="two CPU instances of SmolLM2; what `make demo` compares schedulers on",
        config=RunConfig(
            n=4,
            sampling=Sampling(max_tokens=640),
            compare=CompareConfig(schedulers=("verl-sync", "verl", "seer")),
            rollout=RolloutConfig(model="smollm2", instances=2, device="cpu"),
        ),
    ),
    "one-gpu": Preset(
        about="one instance on one GPU",
        config=RunConfig(
            n=8,
            sampling=Sampling(max_tokens=4096),
            rollout=RolloutConfig(model="smollm2", instances=1, device="cuda"),
        ),
    ),
    "eight-gpus": Preset(
        about="eight instances, each on a GPU of its own",
        config=RunConfig(
            n=8,
            sampling=Sampling(max_tokens=4096),
            rollout=RolloutConfig(model="smollm2", instances=8, device="cuda"),
        ),
    ),
}


def preset(name: str) -> RunConfig:
    """The preset of a name; `.rollout` is what `seer.Rollout` takes."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}", hint=nearest(name, PRESETS))
    return PRESETS[name].config
