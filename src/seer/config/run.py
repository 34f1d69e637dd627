# SPDX-License-Identifier: Apache-2.0
"""One `seer rollout` or `seer compare`: the prompts, how they are sampled, and the rollout they run on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from seer.config.rollout import RolloutConfig
from seer.errors import ConfigError
from seer.ranges import Count, Repeats, Responses, Seconds, Seed, Share, check_fields
from seer.scheduling.registry import parse_scheduler
from seer.types import Sampling

NATURAL_LENGTHS = "natural"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareConfig:
    """What only `seer compare` reads."""

    schedulers: tuple[str, ...] = ("verl-sync", "verl", "seer")
    """Schedulers to compare; speedups are relative to the first."""
    repeat: Repeats = 1
    """Runs of each scheduler."""
    lengths: str = NATURAL_LENGTHS
    """`natural`, or the folder of a recorded run whose response lengths are repeated."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        if not self.schedulers:
            raise ConfigError("compare.schedulers is empty", hint="name at least one")
        check_fields(self)
        for scheduler in self.schedulers:
            parse_scheduler(scheduler)


def _default_sampling() -> Sampling:
    return Sampling(max_tokens=256)


def _default_rollout() -> RolloutConfig:
    return RolloutConfig(model="smollm2", instances=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything a run is asked for; the whole of a `--config` file."""

    prompts: Path | None = None
    """A JSONL file of texts, chat messages or token ids."""
    n: Responses = 8
    """Responses per prompt."""
    limit: Count | None = None
    """Only the first prompts. None: all."""
    skip_bad: bool = False
    """List prompts that cannot run and go on without them."""
    seed: Seed = 0
    """Equal seeds give equal tokens."""
    verify: Share | None = None
    """Share of the responses to score again during the run. None: none."""
    environment: str | None = None
    """What responses talk to after each turn, as MODULE:NAME or FILE.py:NAME: an async function, or a class that is
    made without arguments. None: nothing."""
    environment_deadline_s: Seconds = 60.0
    """Of each call of the environment."""
    out: Path | None = None
    """Results file. None: results.jsonl in the run's folder."""
    run_dir: Path | None = None
    """The run's folder. None: runs/ and the time."""
    sampling: Sampling = field(default_factory=_default_sampling)
    """How tokens are sampled, and the longest response."""
    compare: CompareConfig = field(default_factory=CompareConfig)
    """What only `seer compare` reads."""
    rollout: RolloutConfig = field(default_factory=_default_rollout)
    """The model, the instances and their memory."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        check_fields(self)

    def fitted(self) -> RunConfig:
        """The same with the defaults of the device filled in."""
        return replace(self, rollout=self.rollout.fitted())
