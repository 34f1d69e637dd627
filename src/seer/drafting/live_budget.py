"""Decides how much to draft, from measured step costs and measured acceptance.

Invariants
  1. Where drafting does not pay, nothing is drafted except a small, regular trial that keeps the measurement current.
  2. As long as costs are unknown, steps with and without drafts alternate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from seer.drafting.base import Allowance
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.speculation.budget import best_depth, time_per_token_s
from seer.speculation.step_cost import MeasuredCost
from seer.speculation.step_report import StepReport

TRIAL_TOKENS, TRIAL_STEPS = 2, 2
"""Where drafting does not pay, a few steps draft a little all the same now and then, so that a change of fortune is
seen."""
FIRST_PATIENCE_STEPS = 8
"""Steps between the first two trials; then twice as many each time."""
TRIAL_SHARE = 0.01
"""Of the time, at most, that trials take beyond what the same steps would have taken without drafts."""


class MeasuredBudget:
    """A draft budget from what steps have been measured to cost. Implements `DraftBudget`."""

    def __init__(
        self,
        drafter: GroupedDrafter,
        *,
        only_depth: int | None = None,
        depths: Sequence[int] | None = None,
        max_paths: int = 1,
    ) -> None:
        self._drafter = drafter
        self._depths = depths
        """For engines that pad a step's drafts up to one of these."""
        self._max_paths = max_paths
        """Of a tree of as many tokens as the budget allows."""
        self._only_depth = only_depth
        """For engines whose steps cost the same whatever part of this depth is drafted."""
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
        # As long as costs are unknown, steps with and without drafts take turns.
        if self._num_idle < (self._patience_steps if self._cost.is_known else 1):
            return Allowance(0, self._max_paths)
        self._num_idle = 0
        if self._cost.is_known:
            self._patience_steps = min(2 * self._patience_steps, self._longest_patience_steps(num_running))
        return Allowance(TRIAL_TOKENS, self._max_paths, TRIAL_STEPS)

    def on_step(self, report: StepReport) -> None:
        """Learn what a step cost."""
        self._cost.learn(report)
        if not report.num_drafted:
            self._num_idle += report.num_steps

    def _longest_patience_steps(self, num_running: int) -> int:
        """Until trials, should all their drafts be wrong, cost no more than their share."""
        with_s = self._cost.step_s(num_running, 1 + TRIAL_TOKENS) + self._cost.draft_s(num_running, TRIAL_TOKENS)
        lost_steps = TRIAL_STEPS * (with_s / self._cost.step_s(num_running, 1) - 1.0)
        return max(FIRST_PATIENCE_STEPS, math.ceil(lost_steps / TRIAL_SHARE))

    def _best_depth(self, num_running: int) -> int:
        survival = self._drafter.acceptance.survival()
        if self._only_depth is None:
            return best_depth(self._cost, num_running, survival, depths=self._depths)
        on_s, off_s = (time_per_token_s(self._cost, num_running, survival, d) for d in (self._only_depth, 0))
        return self._only_depth if on_s < off_s else 0
