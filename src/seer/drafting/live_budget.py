# SPDX-License-Identifier: Apache-2.0
"""Decides how much to draft: the budget of seer.speculation with measured step costs and measured acceptance.

Invariants
  1. Where drafting does not pay, nothing is drafted except a trial of TRIAL_TOKENS for TRIAL_STEPS steps now and then,
     which keeps the measurement current and costs about TRIAL_SHARE of the time at most.
  2. As long as costs are unknown, steps with and without drafts alternate.
  3. A decision for a batch is kept for REVIEW_STEPS steps.

A batch that is not refilled ends with its slowest requests, and those accept less than the mean. So it drafts by what
they are expected to accept, which costs the others little: they would wait for the slowest.
"""

from __future__ import annotations

import math

from seer.drafting.base import Allowance, RunningBatch
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.speculation.acceptance import slowest_survival
from seer.speculation.budget import allot
from seer.speculation.step_cost import MeasuredCost
from seer.speculation.step_report import StepReport
from seer.speculation.throughput import (
    MAX_DEPTH,
    MAX_PATHS,
    MAX_TOKENS,
    Acceptance,
    BatchClass,
    DraftLimits,
    StepCost,
)
from seer.types import DraftMode, budget_rule

LINES = DraftLimits(tuple(range(MAX_DEPTH + 1)))
"""Of an engine that verifies one path."""
TREES = DraftLimits(tuple(range(MAX_TOKENS + 1)), MAX_PATHS)
"""Of an engine that verifies trees."""
REVIEW_STEPS = 8
"""Steps after which the size for a batch is chosen again: as often as costs are fitted again."""
TRIAL_TOKENS, TRIAL_STEPS = 2, 2
"""Size and length of a trial: the least that shows whether drafts have started to pay."""
FIRST_PATIENCE_STEPS = 8
"""Steps between the first two trials; doubled after each trial, so that a long dry spell costs little."""
TRIAL_SHARE = 0.01
"""Most time that trials may add, as a share: small enough not to be seen in a run's duration."""


class MeasuredBudget:
    """A draft budget from measured step costs. Implements `DraftBudget`."""

    def __init__(self, drafter: GroupedDrafter, limits: DraftLimits = LINES, *, start: StepCost | None = None) -> None:
        """`start` is a profile to go by until this instance's own steps are known."""
        self._drafter = drafter
        self._limits = limits
        self._cost = MeasuredCost(start)
        self._num_idle = 0  # steps since drafts were last asked for
        self._patience_steps = FIRST_PATIENCE_STEPS
        self._chosen: dict[tuple[DraftMode, RunningBatch], Allowance] = {}
        self._until_review = REVIEW_STEPS

    def __call__(self, batch: RunningBatch) -> Allowance:
        """How much each request of the next step may draft."""
        if self._drafter.mode == "none":
            return Allowance(0)
        best = self._best(batch) if self._cost.is_known else Allowance(0, self._paths)
        if best.most:
            self._num_idle, self._patience_steps = 0, FIRST_PATIENCE_STEPS
            return best
        # Unknown costs: alternate steps with and without drafts.
        if self._num_idle < (self._patience_steps if self._cost.is_known else 1):
            return best
        self._num_idle = 0
        if self._cost.is_known:
            self._patience_steps = min(2 * self._patience_steps, self._longest_patience_steps(batch.num_requests))
        return Allowance(TRIAL_TOKENS, self._paths, TRIAL_STEPS)

    def on_step(self, report: StepReport) -> None:
        """Take in what a step cost."""
        self._cost.learn(report)
        self._until_review -= report.num_steps
        if self._until_review <= 0:
            self._until_review = REVIEW_STEPS
            self._chosen.clear()
        if not report.num_drafted:
            self._num_idle += report.num_steps

    def _longest_patience_steps(self, num_running: int) -> int:
        """Steps between trials at which trials cost TRIAL_SHARE even if all their drafts are rejected."""
        with_s = self._cost.step_s(num_running, 1 + TRIAL_TOKENS) + self._cost.draft_s(num_running, TRIAL_TOKENS)
        lost_steps = TRIAL_STEPS * (with_s / self._cost.step_s(num_running, 1) - 1.0)
        return max(FIRST_PATIENCE_STEPS, math.ceil(lost_steps / TRIAL_SHARE))

    @property
    def _paths(self) -> int:
        return self._limits.max_paths if self._drafter.mode == "grouped" else 1  # the paper's rule drafts one path

    def _best(self, batch: RunningBatch) -> Allowance:
        key = self._drafter.mode, batch
        known = self._chosen.get(key)
        if known is None:
            known = self._chosen[key] = self._choose(batch)
        return known

    def _choose(self, batch: RunningBatch) -> Allowance:
        survival = self._drafter.acceptance.survival()
        if not batch.is_refilled and self._drafter.mode == "grouped":  # the paper's rule goes by the mean
            survival = slowest_survival(survival, batch.num_requests)
        acceptance = Acceptance({self._paths: survival})
        classes = [
            BatchClass(batch.num_probes, acceptance, is_probe=True),
            BatchClass(batch.num_requests - batch.num_probes, acceptance),
        ]
        if self._drafter.mode == "own":  # plain speculation knows no probes
            classes = [BatchClass(batch.num_requests, acceptance)]
        sizes = allot(budget_rule(self._drafter.mode), self._cost, classes, self._limits)
        return Allowance(sizes[-1].tokens, self._paths, max_probe_tokens=sizes[0].tokens)
