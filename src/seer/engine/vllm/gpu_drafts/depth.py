# SPDX-License-Identifier: Apache-2.0
"""How many drafts each request verifies in the next step: the one budget over this engine's own measured steps.

Steps run full graphs, so their cost is a table, not a line: one mean per depth and range of batch sizes. The choice is
`seer.speculation.budget.allot` over that table and the measured acceptance.

Invariants
  1. Only depths that the engine has graphs for are chosen.
  2. A depth is tried for TRIAL_STEPS steps in each range of batch sizes, unless a bound from cheaper shapes shows that
     it cannot pay.
  3. Depths that were not chosen are tried again, ever more seldom: trials cost about TRIAL_SHARE of the time at most.
  4. By the paper's rule no depth beyond its most is chosen or tried.
  5. Pure: durations are passed in.

All requests of a step draft equally many, because its graph is captured so. The paper's rule therefore keeps its depth
and loses what it does with it: it would give probes another share than the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from seer.engine.vllm.gpu_drafts.graphs import Shapes
from seer.speculation.acceptance import AcceptanceTracker
from seer.speculation.budget import allot
from seer.speculation.throughput import MAX_DEPTH, Acceptance, BatchClass, DraftLimits, tokens_per_step
from seer.types import BudgetRule

RANGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Upper ends of the ranges of batch sizes that share a mean."""
TRIAL_STEPS = 4
"""Enough for a mean that decides; the first step of a trial also pays for what it changes."""
TRIAL_SHARE = 0.01
"""Most time that trials may add, as a share: small enough not to be seen in a run's duration."""
FIRST_PATIENCE_STEPS = 64
"""Steps between the first two trials of a depth; doubled after each."""
DECAY = 0.9
"""Of a mean, per step: contexts grow, so the newest steps count most."""
STALL_RATIO = 3.0
"""A step that took this many times the mean of its shape was delayed by something else."""


@dataclass(slots=True)
class _Range:
    """What is known of one range of batch sizes."""

    mean_s: dict[int, float] = field(default_factory=dict)
    num_steps: dict[int, int] = field(default_factory=dict)
    since_trial: dict[int, int] = field(default_factory=dict)
    patience_steps: dict[int, int] = field(default_factory=dict)


class DepthBudget:
    """Chooses a depth per step; the `StepCost` of the budget, over the range of batch sizes last asked about."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._ranges = [_Range() for _ in range(len(RANGES) + 1)]
        self._at = self._ranges[0]
        self._trial = (0, 0)  # depth, steps left
        self.acceptance = AcceptanceTracker(prior_acceptance=0.5, prior_weight=32.0, half_life=4096.0)

    def choose(self, num_requests: int, rule: BudgetRule) -> int:
        """Drafts per request for a step of so many requests."""
        allowed = self._shapes.depths_of(num_requests)
        if rule == "paper":
            allowed = [depth for depth in allowed if depth <= MAX_DEPTH]
        at = self._at = self._ranges[_range_of(num_requests)]
        depth, left = self._trial
        if left and depth in allowed:
            self._trial = (depth, left - 1)
            return depth
        survival = self.acceptance.survival()
        known = [depth for depth in allowed if at.num_steps.get(depth, 0) >= TRIAL_STEPS]
        best = self._best(rule, num_requests, known, survival) if known else None
        for depth in allowed:
            if depth != best and self._is_due(depth, best, survival):
                self._trial = (depth, TRIAL_STEPS - 1)
                return depth
        return 0 if best is None else best

    def learn(self, num_requests: int, depth: int, duration_s: float, num_emitted: Iterable[int]) -> None:
        """A step of one shape was computed; `num_emitted` has the tokens that each of its requests got."""
        at = self._ranges[_range_of(num_requests)]
        for other in at.since_trial:
            at.since_trial[other] += 1
        at.since_trial[depth] = 0
        mean_s = at.mean_s.get(depth)
        if mean_s is None or at.num_steps[depth] < TRIAL_STEPS:
            # The first ones may be slowed by what they follow: the least counts.
            at.mean_s[depth] = duration_s if mean_s is None else min(mean_s, duration_s)
        elif duration_s < STALL_RATIO * mean_s:
            at.mean_s[depth] = DECAY * mean_s + (1.0 - DECAY) * duration_s
        at.num_steps[depth] = at.num_steps.get(depth, 0) + 1
        if depth:
            lengths = list(num_emitted)
            accepted = [sum(length > position for length in lengths) for position in range(1, depth + 1)]
            self.acceptance.observe_many([len(lengths)] * depth, accepted)

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        """The measured mean of a shape."""
        return self._at.mean_s[round(tokens_per_request) - 1]

    def draft_s(self, num_requests: int, depth: float) -> float:
        """Nothing: drafting on the GPU is part of the step."""
        return 0.0

    def _best(self, rule: BudgetRule, num_requests: int, depths: list[int], survival: list[float]) -> int:
        batch = [BatchClass(num_requests, Acceptance({1: survival}))]
        return allot(rule, self, batch, DraftLimits(tuple(depths), 1, is_uniform=True))[0].tokens

    def _is_due(self, depth: int, best: int | None, survival: list[float]) -> bool:
        at = self._at
        if at.num_steps.get(depth, 0) < TRIAL_STEPS:
            return best is None or self._could_pay(depth, best, survival)
        patience = at.patience_steps.setdefault(depth, FIRST_PATIENCE_STEPS)
        if best is None or at.since_trial[depth] < patience:
            return False
        lost_steps = TRIAL_STEPS * max(0.0, at.mean_s[depth] / at.mean_s[best] - 1.0)
        at.patience_steps[depth] = max(2 * patience, round(lost_steps / TRIAL_SHARE))
        return True

    def _could_pay(self, depth: int, best: int, survival: list[float]) -> bool:
        """Whether the depth would be better than the best one if it cost no more than the next shallower one."""
        at = self._at
        shallower = max((known for known in at.mean_s if known < depth), default=None)
        if shallower is None:
            return True
        best_rate = tokens_per_step(survival, best) / at.mean_s[best]
        return tokens_per_step(survival, depth) / at.mean_s[shallower] > best_rate


def _range_of(num_requests: int) -> int:
    return bisect_left(RANGES, num_requests)
