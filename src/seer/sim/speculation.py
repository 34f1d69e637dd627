# SPDX-License-Identifier: Apache-2.0
"""Speculation in the simulator: how many draft tokens are accepted, and how deep drafts are.

Acceptance comes from a curve over the number of sibling references: the paper's Table 2, or one measured by
`seer drafts replay`. Depths come from the rules of `seer.speculation.budget` with the simulated instance's step costs.
Engines run another budget (seer.drafting.live_budget): it has one depth for the whole batch, and no classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from seer.sim.costs import InstanceCost
from seer.speculation.budget import MAX_DEPTH, OFF, Depths, Rule, allot, geometric_survival, tokens_per_step

PAPER_TABLE_2: Mapping[int, tuple[tuple[int, float], ...]] = {
    1: ((0, 1.70), (1, 2.04), (5, 2.32), (15, 2.53)),
    2: ((0, 1.77), (1, 2.14), (5, 2.44), (15, 2.69)),
    4: ((0, 1.85), (1, 2.25), (5, 2.59), (15, 2.85)),
}
"""The paper's measured mean acceptance length by number of grouped references, for 1, 2 and 4 paths. Taken to be for
drafts of up to MAX_DEPTH tokens."""


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """Mean acceptance length (bonus token included) by number of sibling references."""

    points: tuple[tuple[int, float], ...] = PAPER_TABLE_2[1]

    def length(self, num_references: float) -> float:
        """Interpolated in log(1 + references), constant outside the measured range."""
        x = math.log1p(num_references)
        below_x, below_y = math.log1p(self.points[0][0]), self.points[0][1]
        for references, value in self.points:
            point_x = math.log1p(references)
            if x <= point_x:
                span = point_x - below_x
                return value if span == 0 else below_y + (value - below_y) * (x - below_x) / span
            below_x, below_y = point_x, value
        return below_y

    def rate(self, num_references: float) -> float:
        """The constant acceptance rate α that gives this length with drafts of MAX_DEPTH tokens."""
        return _rate(self, num_references)


@lru_cache(maxsize=4096)
def _rate(curve: AcceptanceCurve, num_references: float) -> float:
    return acceptance_rate(round(curve.length(num_references), 3))


@lru_cache(maxsize=4096)
def acceptance_rate(length: float) -> float:
    """Solve τ(MAX_DEPTH) = length for α by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if tokens_per_step(geometric_survival(middle), MAX_DEPTH) < length:
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True)
class GroupProgress:
    """How many requests of each group have finished and how many are running: drafts come from their text."""

    num_finished: dict[int, int] = field(default_factory=dict)
    num_running: dict[int, int] = field(default_factory=dict)

    def started(self, group: int) -> None:
        """A request of the group has started a chunk."""
        self.num_running[group] = self.num_running.get(group, 0) + 1

    def stopped(self, group: int, *, finished: bool) -> None:
        """Its chunk has ended; `finished` if the request has too."""
        self.num_running[group] -= 1
        if finished:
            self.num_finished[group] = self.num_finished.get(group, 0) + 1

    def references(self, group: int) -> float:
        """Finished siblings count 1, running ones 1/2: on average half of them are ahead of a given request."""
        others_running = max(0, self.num_running.get(group, 0) - 1)
        return self.num_finished.get(group, 0) + others_running / 2


@dataclass(frozen=True, slots=True)
class SpeculationModel:
    """Which drafts are made (`grouped`, or from a request's own text) and how their depth is chosen."""

    grouped: bool
    rule: Rule = "marginal"
    curve: AcceptanceCurve = AcceptanceCurve()

    def acceptance(self, progress: GroupProgress, group: int) -> float:
        """α for a request of this group now."""
        return self.curve.rate(progress.references(group) if self.grouped else 0.0)

    def depths(
        self, cost: InstanceCost, num_probes: int, num_others: int, context_tokens: float, acceptance: float
    ) -> Depths:
        """Draft depths for a batch with this mean acceptance."""
        if num_probes + num_others == 0:
            return OFF
        survival: Sequence[float] = geometric_survival(acceptance)
        return allot(self.rule, ModelledStep(cost, context_tokens), num_probes, num_others, survival)


@dataclass(frozen=True, slots=True)
class ModelledStep:
    """An instance's cost at a given amount of context, as the budget's `StepCost`."""

    cost: InstanceCost
    context_tokens: float

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        """Seconds of one step, drafting included."""
        step = self.cost.step(num_requests, tokens_per_request)
        return step.base_s + step.per_context_token_s * self.context_tokens

    def draft_s(self, num_requests: int, depth: float) -> float:
        """0, because `step_s` includes it."""
        return 0.0
