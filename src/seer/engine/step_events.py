# SPDX-License-Identifier: Apache-2.0
"""Adds the steps of an engine up into `Stepped` events, a few a second; the same for every engine.

Invariants
  1. Every step is in exactly one event, unless `clear` drops it.
  2. Steps with and without prefill are in separate events, so the log shows what a plain decoding step costs.
"""

from __future__ import annotations

from seer.metrics.events import Stepped
from seer.speculation.step_report import StepReport

REPORT_S = 0.25
"""Seconds between two events of an instance: often enough for a live view, rare enough to cost nothing next to steps
of milliseconds."""


class StepTally:
    """The steps of one instance that no event has reported yet."""

    def __init__(self, instance: int) -> None:
        self._instance = instance
        self._steps: list[StepReport] = []
        self._reported_s = 0.0

    def add(self, report: StepReport) -> None:
        """Count one report."""
        self._steps.append(report)

    def is_due(self, now_s: float) -> bool:
        """Whether the last events are REPORT_S old."""
        return now_s - self._reported_s >= REPORT_S

    def take(self, now_s: float) -> list[Stepped]:
        """Events for every step since the last call: one for plain decoding steps, one for steps with prefill."""
        self._reported_s = now_s
        steps, self._steps = self._steps, []
        plain = [step for step in steps if not step.num_prefill_tokens]
        mixed = [step for step in steps if step.num_prefill_tokens]
        return [add_up(now_s, self._instance, chosen) for chosen in (plain, mixed) if chosen]

    def clear(self) -> None:
        """Drop the steps of an earlier run."""
        self._steps = []


def add_up(now_s: float, instance: int, steps: list[StepReport]) -> Stepped:
    """One event for several reports."""
    # A report may stand for several equal steps; its duration and batched tokens are then those of one step.
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
        overlapped_load_s=sum(step.overlapped_load_s for step in steps),
        loaded_bytes=sum(step.loaded_bytes for step in steps),
        far_load_s=sum(step.far_load_s for step in steps),
        far_loaded_bytes=sum(step.far_loaded_bytes for step in steps),
        num_preempted=sum(step.num_preempted for step in steps),
        num_unsaved_blocks=sum(step.num_unsaved_blocks for step in steps),
    )
