"""What one step of an engine did, for the speculation budget and for metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did, for the speculation budget and for metrics."""

    duration_s: float
    """Of one step, KV that was loaded apart; the mean where several were made in one go."""
    num_steps: int
    num_running: int
    num_batched_tokens: int
    """Tokens a forward pass computed, draft nodes included; the mean where there were several."""
    num_prefill_tokens: int
    mean_context_tokens: int
    num_emitted: int
    """Tokens that became part of a response."""
    num_drafted: int
    num_accepted: int
    load_s: float = 0.0
    """Spent on KV from the pool before the step."""
    overlapped_load_s: float = 0.0
    """Spent on KV from the pool while steps ran."""
    loaded_bytes: int = 0
    """In either time."""
    has_captured: bool = False
    """A CUDA graph was captured during the step, so its duration does not represent other steps."""
    num_preempted: int = 0
    """Requests whose KV was dropped for others since the last report."""


StepObserver = Callable[[StepReport], None]
