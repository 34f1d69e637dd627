# SPDX-License-Identifier: Apache-2.0
"""Decides how much to draft: the budget of seer.speculation with measured step costs and measured acceptance.

Invariants
  1. Where drafting does not pay, nothing is drafted except a trial of TRIAL_TOKENS for TRIAL_STEPS steps now and then,
     which keeps the measurement current and costs about TRIAL_SHARE of the time at most.
  2. As long as costs are unknown, steps with and without drafts alternate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from seer.drafting.base import Allowance
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.speculation.budget import allot
from seer.speculation.step_cost import MeasuredCost
from seer.speculation.step_report import StepReport
from seer.speculation.throughput import MAX_DEPTH, Acceptance, BatchClass, DraftLimits

TRIAL_TOKENS, TRIAL_STEPS = 2, 2
"""Size and length of a trial: the least that shows whether drafts have started to pay."""
FIRST_PATIENCE_STEPS = 8
"""Steps between the first two trials; doubled after each trial, so that a long dry spell costs little."""
TRIAL_SHARE = 0.01
"""Most time that trials may add, as a share: small enough not to be seen in a run's duration."""


class MeasuredBudget:
    """A draft budget from measured step costs. Implements `DraftBudget`."""

    def __init__(
        self,
        drafter: GroupedDrafter,
        *,
        only_depth: int | None = None,
        depths: Sequence[int] | None = None,
        max_paths: int = 1,
    ) -> None:
        self._drafter = drafter
        self._max_paths = max_paths
        """Most paths of a draft tree."""
        self._limits = _limits(only_depth, depths, max_paths)
        self._cost = MeasuredCost()
        self._num_idle = 0  # steps since drafts were last asked for
        self._patience_steps = FIRST_PATIENCE_STEPS

    def __call__(self, num_running: int, mean_context_tokens: int) -> Allowance:
        """How much each request of the next step may draft."""
        if self._drafter.mode == "none":
            return Allowance(0)
        depth = self._best_depth(num_running) if self._cost.is_known else 0
        if depth:
            self._num_idle, self._patience_steps = 0, FIRST_PATIENCE_STEPS
            return Allowance(depth, self._max_paths)
        # Unknown costs: alternate steps with and without drafts.
        if self._num_idle < (self._patience_steps if self._cost.is_known else 1):
            return Allowance(0, self._max_paths)
        self._num_idle = 0
        if self._cost.is_known:
            self._patience_steps = min(2 * self._patience_steps, self._longest_patience_steps(num_running))
        return Allowance(TRIAL_TOKENS, self._max_paths, TRIAL_STEPS)

    def on_step(self, report: StepReport) -> None:
        """Take in what a step cost."""
        self._cost.learn(report)
        if not report.num_drafted:
            self._num_idle += report.num_steps

    def _longest_patience_steps(self, num_running: int) -> int:
        """Steps between trials at which trials cost TRIAL_SHARE even if all their drafts are rejected."""
        with_s = self._cost.step_s(num_running, 1 + TRIAL_TOKENS) + self._cost.draft_s(num_running, TRIAL_TOKENS)
        lost_steps = TRIAL_STEPS * (with_s / self._cost.step_s(num_running, 1) - 1.0)
        return max(FIRST_PATIENCE_STEPS, math.ceil(lost_steps / TRIAL_SHARE))

    def _best_depth(self, num_running: int) -> int:
        acceptance = Acceptance({self._max_paths: self._drafter.acceptance.survival()})
        return allot("seer", self._cost, [BatchClass(num_running, acceptance)], self._limits)[0].tokens


def _limits(only_depth: int | None, depths: Sequence[int] | None, max_paths: int) -> DraftLimits:
    """`only_depth` is for engines whose steps cost the same for every draft up to it, `depths` for those that pad."""
    if only_depth is not None:
        return DraftLimits((0, only_depth), max_paths, is_uniform=True)
    choices = range(MAX_DEPTH + 1) if depths is None else depths
    return DraftLimits(tuple(choice for choice in choices if choice <= MAX_DEPTH), max_paths, depths is not None)
