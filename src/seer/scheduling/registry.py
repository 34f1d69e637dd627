"""The schedulers by name, as users write them: `seer`, `verl-sync`, `context`, ... and `+sd` for plain speculation.

| name            | requests             | order                                        | speculation  |
|-----------------|----------------------|----------------------------------------------|--------------|
| verl-sync       | whole, placed once   | contiguous blocks of groups per instance     | -            |
| verl            | whole, placed once   | per request, fewest in flight                | -            |
| group           | whole, placed once   | per group, fewest pending                    | -            |
| streamrl-oracle | whole, placed once   | true lengths, long tail apart, longest first | -            |
| partial         | as verl-sync         | twice the groups, stops when enough are whole| - (off-policy)|
| divided         | chunks               | first come, first served                     | -            |
| context         | chunks               | probes, then longest estimated group         | -            |
| oracle          | chunks               | true lengths, longest remaining first        | -            |
| seer-paper      | as context           |                                              | grouped      |
| seer            | chunks that fit      | by what is scarce: least far, most expected  | grouped      |
| seer-oracle     | chunks that fit      | as seer, with true lengths                   | -            |
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
from seer.scheduling.dispatch import StreamRLOracle, Verl, VerlSync, WholeGroup
from seer.scheduling.divided import Divided
from seer.scheduling.longest_first import LongestRemainingFirst
from seer.scheduling.memory_or_slot import LEVEL_RATIO
from seer.scheduling.seer import EarliestFinishPlacement, Seer
from seer.types import DraftMode


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What every scheduler may be given; each takes what it needs."""

    chunk_tokens: int = 8192
    """Tokens a request may generate before it returns to the buffer."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    starvation_period: int = 64
    """One decision in so many goes to the least served group; 0 turns the guard off."""
    whole_blocks: bool = False
    """Let chunks end where a KV block has just become full; instances that keep whole blocks only want this."""

    def __post_init__(self) -> None:
        """A chunk makes progress."""
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens={self.chunk_tokens}", hint="use at least 1")


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """A scheduler as a user named it."""

    name: str
    drafts: DraftMode
    oversample: int = 1
    """Groups issued for each group wanted; above 1 the result is off-policy in its length distribution."""
    needs_true_lengths: bool = False

    @property
    def off_policy(self) -> bool:
        """Whether it changes which responses are trained on."""
        return self.oversample > 1


Factory = Callable[[SchedulerSettings, Context, TrueLength], Scheduler]


def _divided(settings: SchedulerSettings, context: Context, true_length: TrueLength) -> Scheduler:
    return Divided(chunk_tokens=settings.chunk_tokens, placement=settings.placement, whole_blocks=settings.whole_blocks)


def _context(settings: SchedulerSettings, context: Context, true_length: TrueLength) -> Scheduler:
    ordering = ProbesThenLongestGroup(context, starvation_period=settings.starvation_period)
    return Divided(
        ordering,
        chunk_tokens=settings.chunk_tokens,
        placement=settings.placement,
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
    "streamrl-oracle": lambda settings, context, true_length: StreamRLOracle(true_length),
    "partial": lambda settings, context, true_length: VerlSync(),
    "divided": _divided,
    "context": _context,
    "oracle": _oracle,
    "seer-paper": _context,
    "seer": _seer,
    "seer-oracle": _seer_oracle,
}
NAMES = tuple(_FACTORIES)
_GROUPED = ("seer", "seer-paper")
_ORACLES = ("oracle", "seer-oracle", "streamrl-oracle")


def parse_scheduler(name: str) -> SchedulerSpec:
    """Read a scheduler's name, `+sd` included."""
    base, plus, suffix = name.partition("+")
    if base not in _FACTORIES or (plus and suffix != "sd"):
        close = difflib.get_close_matches(base, NAMES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(NAMES)}; +sd adds plain speculation"
        raise ConfigError(f"unknown scheduler {name!r}", hint=hint)
    drafts: DraftMode = "grouped" if base in _GROUPED else ("own" if plus else "none")
    oversample = 2 if base == "partial" else 1
    return SchedulerSpec(name, drafts, oversample, needs_true_lengths=base in _ORACLES)


def make_scheduler(
    spec: SchedulerSpec, settings: SchedulerSettings, context: Context, true_length: TrueLength
) -> Scheduler:
    """The scheduler itself."""
    return _FACTORIES[spec.name.partition("+")[0]](settings, context, true_length)
