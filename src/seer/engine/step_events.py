"""Steps of an engine, added up into the events that tell of them; the same for every engine."""

from __future__ import annotations

from seer.metrics.events import Stepped
from seer.speculation.step_report import StepReport

REPORT_S = 0.25
"""Between two such events of an instance."""


def add_up(now_s: float, instance: int, steps: list[StepReport]) -> Stepped:
    """One event for several steps."""
    # A report may stand for a burst of equal steps; its time and rows are then those of one of them.
    return Stepped(
        now_s,
        instance,
        num_steps=sum(step.num_steps for step in steps),
        duration_s=sum(step.duration_s * step.num_steps for step in steps),
        num_batched_tokens=sum(step.num_batched_tokens * step.num_steps for step in steps),
        num_prefill_tokens=sum(step.num_prefill_tokens * step.num_steps for step in steps),
        num_emitted=sum(step.num_emitted for step in steps),
        num_drafted=sum(step.num_drafted for step in steps),
        num_accepted=sum(step.num_accepted for step in steps),
        load_s=sum(step.load_s for step in steps),
        load_aside_s=sum(step.load_aside_s for step in steps),
        loaded_bytes=sum(step.loaded_bytes for step in steps),
        num_preempted=sum(step.num_preempted for step in steps),
    )
