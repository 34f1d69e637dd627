# SPDX-License-Identifier: Apache-2.0
"""Settings of a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from seer.config.rollout import SPECULATION_MODES
from seer.errors import ConfigError
from seer.metrics.events import EventSink, discard
from seer.scheduling.registry import parse_scheduler
from seer.spread import Spread

BATCH_SCHEDULERS = ("verl-sync", "group", "streamrl-oracle", "partial")
"""Place a whole batch at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Settings of a session."""

    scheduler: str = "seer"
    speculation: str = "auto"
    seed: int = 0
    """Submissions without a seed get theirs from this one, in order."""
    chunk_tokens: int | None = None
    """None: an eighth of the longest response."""
    longest_response_tokens: int | None = None
    """None: whatever an instance holds."""
    length_hints: Mapping[str, int] | None = None
    """By group name: the longest response in an earlier epoch."""
    spread: Spread = field(default_factory=Spread)
    """What earlier runs and sessions have shown, and this one learns."""
    events: EventSink = discard
    vocab_size: int | None = None
    """Token ids that an environment gives must be below this; None: not known."""
    stall_deadline_s: float = 900.0
    cancel_deadline_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse schedulers that need the whole batch, or the lengths, and unknown kinds of speculation."""
        if self.speculation not in SPECULATION_MODES:
            raise ConfigError(f"speculation={self.speculation!r}", hint=" or ".join(SPECULATION_MODES))
        spec = parse_scheduler(self.scheduler)
        if spec.name.partition("+")[0] in BATCH_SCHEDULERS or spec.needs_true_lengths:
            raise ConfigError(
                f"scheduler {spec.name!r} needs all prompts at once; a session gets them one by one",
                hint="seer, seer-paper, context, divided or verl",
            )
