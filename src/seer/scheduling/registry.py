# SPDX-License-Identifier: Apache-2.0
"""The schedulers by the names users give: `seer`, `verl-sync`, `context`, ...; `+sd` adds plain speculation.

| name            | requests             | order                                        | speculation  |
|-----------------|----------------------|----------------------------------------------|--------------|
| verl-sync       | whole, placed once   | contiguous ranges of groups per instance     | -            |
| verl            | whole, placed once   | per request, fewest in flight                | -            |
| group           | whole, placed once   | per group, fewest pending                    | -            |
| streamrl-oracle | whole, placed once   | true lengths, long groups apart, longest first| -           |
| partial         | as verl-sync         | twice the groups, stops when enough are done | - (off-policy)|
| divided         | chunks               | one queue; a returning request goes last     | -            |
| context         | chunks               | probes, then longest estimated group         | -            |
| oracle          | chunks               | true lengths, longest remaining first        | -            |
| seer-paper      | as context           |                                              | grouped      |
| seer            | chunks of fitted size| by what is scarce, memory or sequence slots  | grouped      |
| seer-oracle     | chunks of fitted size| true lengths, longest remaining first        | -            |

`context` and `seer-paper` place as the paper does: the longest cached prefix decides while the instances differ by at
most 32 requests, and more than 512 missing tokens of KV are pulled.

`oracle` is the paper's: it knows the true lengths but has chunks of a fixed size. It is not a bound on throughput.
`seer` and `seer-oracle` choose the size of their chunks and may be faster. How much is drafted is decided by the rule
`seer` of seer.speculation.budget for `seer`, and by the paper's for all others.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field

from seer.buffer import Request
from seer.context import Context
from seer.errors import ConfigError
from seer.placement import PlacementConfig
from seer.scheduling.base import Scheduler, TrueLength
from seer.scheduling.context_aware import ProbesThenLongestGroup
from seer.scheduling.dispatch import Verl, VerlSync, WholeGroup
from seer.scheduling.divided import Divided
from seer.scheduling.longest_first import LongestRemainingFirst
from seer.scheduling.memory_or_slot import LEVEL_RATIO
from seer.scheduling.seer import EarliestFinishPlacement, Seer
from seer.scheduling.streamrl import StreamRLOracle, TokenSeconds
from seer.types import DraftMode


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Settings of all schedulers; each uses the ones that it needs."""

    chunk_tokens: int = 8192
    """Tokens a request may generate before it returns to the buffer."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    starvation_period: int = 64
    """One decision in this many goes to the least served group; 0 turns this off."""
    whole_blocks: bool = False
    """End chunks where a KV block has just become full. For instances that keep only whole blocks between chunks."""
    token_s: TokenSeconds | None = None
    """What a step takes, for `streamrl-oracle`."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens={self.chunk_tokens} must be at least 1")


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """A scheduler's name, parsed."""

    name: str
    drafts: DraftMode
    oversample: int = 1
    """Groups started for each group wanted. Above 1, short responses are preferred: the result is off-policy."""
    needs_true_lengths: bool = False

    @property
    def off_policy(self) -> bool:
        """Whether it biases which responses are trained on."""
        return self.oversample > 1


Factory = Callable[[SchedulerSettings, Context, TrueLength], Scheduler]


def _divided(settings: SchedulerSettings, context: Context, true_length: TrueLength) -> Scheduler:
    return Divided(chunk_tokens=settings.chunk_tokens, placement=settings.placement, whole_blocks=settings.whole_blocks)


def _context(settings: SchedulerSettings, context: Context, true_length: TrueLength) -> Scheduler:
    ordering = ProbesThenLongestGroup(context, starvation_period=settings.starvation_period)
    return Divided(
        ordering,
        chunk_tokens=settings.chunk_tokens,
        placement=settings.placement.as_in_the_paper(),
        whole_blocks=settings.whole_blocks,
    )


def _oracle(settings: SchedulerSettings, context: Context, true_length: TrueLength) -> Scheduler:
    ordering = LongestRemainingFirst(lambda request: true_length(request) - request.num_generated)
    return Divided(
        ordering,
        chunk_tokens=settings.chunk_tokens,
        placement=settings.placement,
        whole_blocks=settings.whole_blocks,
    )


def _seer(settings: SchedulerSettings, context: Context, true_length: TrueLength) -> Scheduler:
    return Seer(
        context,
        max_chunk_tokens=settings.chunk_tokens,
        placement=settings.placement,
        whole_blocks=settings.whole_blocks,
    )


def _seer_oracle(settings: SchedulerSettings, context: Context, true_length: TrueLength) -> Scheduler:
    def remaining_tokens(request: Request) -> float:
        return float(true_length(request) - request.num_generated)

    return EarliestFinishPlacement(
        LongestRemainingFirst(remaining_tokens, level_ratio=LEVEL_RATIO),
        remaining_tokens,
        max_chunk_tokens=settings.chunk_tokens,
        placement=settings.placement,
        whole_blocks=settings.whole_blocks,
    )


_FACTORIES: dict[str, Factory] = {
    "verl-sync": lambda settings, context, true_length: VerlSync(),
    "verl": lambda settings, context, true_length: Verl(),
    "group": lambda settings, context, true_length: WholeGroup(),
    "streamrl-oracle": lambda settings, context, true_length: StreamRLOracle(true_length, settings.token_s),
    "partial": lambda settings, context, true_length: VerlSync(),
    "divided": _divided,
    "context": _context,
    "oracle": _oracle,
    "seer-paper": _context,
    "seer": _seer,
    "seer-oracle": _seer_oracle,
}
NAMES = tuple(_FACTORIES)
"""In the order of the table above."""
_GROUPED: dict[str, DraftMode] = {"seer": "grouped", "seer-paper": "grouped-paper"}
"""Draft from siblings."""
_ORACLES = ("oracle", "seer-oracle", "streamrl-oracle")
"""Need the true lengths: in a simulation, or where lengths are forced."""


def parse_scheduler(name: str) -> SchedulerSpec:
    """Parse a scheduler's name, with or without `+sd`."""
    base, plus, suffix = name.partition("+")
    if base not in _FACTORIES or (plus and suffix != "sd"):
        close = difflib.get_close_matches(base, NAMES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(NAMES)}; +sd adds plain speculation"
        raise ConfigError(f"unknown scheduler {name!r}", hint=hint)
    drafts: DraftMode = _GROUPED.get(base, "own" if plus else "none")
    oversample = 2 if base == "partial" else 1
    return SchedulerSpec(name, drafts, oversample, needs_true_lengths=base in _ORACLES)


def make_scheduler(
    spec: SchedulerSpec, settings: SchedulerSettings, context: Context, true_length: TrueLength
) -> Scheduler:
    """Build the scheduler."""
    return _FACTORIES[spec.name.partition("+")[0]](settings, context, true_length)
