# SPDX-License-Identifier: Apache-2.0
"""Speculation in the simulator: how many draft tokens are accepted, and how large drafts are.

Acceptance comes from a curve over the number of sibling references: the paper's Table 2, or one measured by
`seer drafts replay`. Sizes come from the budget that engines use (`seer.speculation.budget.allot`), with the simulated
instance's step costs in place of measured ones.

Several paths are modelled as the paper drafts them, as that many branches at each depth: k paths of depth γ verify k·γ
tokens and gain what a line with a higher acceptance rate would. An engine's trees of as many tokens gain more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from seer.sim.costs import InstanceCost, StepTime
from seer.sim.draft_model import PlainDrafts, acceptance_for
from seer.speculation.budget import allot
from seer.speculation.threshold import DENSE, MIXTURE
from seer.speculation.throughput import (
    MAX_DEPTH,
    MAX_PATHS,
    MAX_TOKENS,
    Acceptance,
    BatchClass,
    DraftLimits,
    DraftSize,
    geometric_survival,
    tokens_per_step,
)
from seer.types import BudgetRule

PAPER_TABLE_2: Mapping[int, tuple[tuple[int, float], ...]] = {
    1: ((0, 1.70), (1, 2.04), (5, 2.32), (15, 2.53)),
    2: ((0, 1.77), (1, 2.14), (5, 2.44), (15, 2.69)),
    4: ((0, 1.85), (1, 2.25), (5, 2.59), (15, 2.85)),
}
"""The paper's measured mean acceptance length by number of grouped references, for 1, 2 and 4 paths. Taken to be for
drafts of up to MAX_DEPTH tokens per path."""
PATH_GAIN = {1: 1.0, 2: 1.10, 4: 1.21}
"""Accepted draft tokens by number of paths, relative to one path: Table 2 at any number of references, within 1%."""
LIMITS = DraftLimits((*range(MAX_DEPTH + 1), 12, MAX_TOKENS, 24, 32, 48, MAX_TOKENS * MAX_PATHS), MAX_PATHS)
"""Sizes to choose from: few, because every choice costs simulation time."""
LINES = DraftLimits()
"""Of plain speculation: up to MAX_DEPTH tokens, on one path."""


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
    """Solve τ(MAX_DEPTH) = length for α."""
    return acceptance_for(length, MAX_DEPTH)


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


@lru_cache(maxsize=65536)
def acceptance_at(rate: float) -> Acceptance:
    """Acceptance of drafts of one, two and four paths where a line has this acceptance rate."""
    accepted = tokens_per_step(geometric_survival(rate), MAX_DEPTH) - 1.0
    return Acceptance({paths: _branches(accepted * gain, paths) for paths, gain in PATH_GAIN.items()})


def _branches(accepted: float, paths: int) -> Sequence[float]:
    """S of `paths` branches at each depth, of which one is right."""
    line = geometric_survival(acceptance_rate(round(1.0 + accepted, 4)), MAX_TOKENS)
    return [1.0, *(reached / paths for reached in line[1:] for _ in range(paths))]


@dataclass(frozen=True, slots=True)
class SpeculationModel:
    """Which drafts are made (`grouped`, or from a request's own text) and how their size is chosen."""

    grouped: bool
    rule: BudgetRule = "seer"
    curve: AcceptanceCurve = AcceptanceCurve()
    plain: PlainDrafts | None = None
    """Of plain speculation, in place of drafts from a request's own text."""
    _step_times: dict[tuple[int, float], StepTime] = field(default_factory=dict, compare=False, repr=False)
    _rates: dict[float, float] = field(default_factory=dict, compare=False, repr=False)

    def acceptance(self, progress: GroupProgress, group: int) -> float:
        """α for a request of this group now."""
        if self.plain is not None:
            return self.plain.acceptance
        references = progress.references(group) if self.grouped else 0.0
        rate = self._rates.get(references)
        if rate is None:
            rate = self._rates[references] = self.curve.rate(references)
        return rate

    def sizes(
        self, cost: InstanceCost, num_probes: int, num_others: int, context_tokens: float, acceptance: float
    ) -> Sizes:
        """Sizes of drafts for a batch with this mean acceptance."""
        accepted = acceptance_at(acceptance)
        classes = [BatchClass(num_probes, accepted, is_probe=True), BatchClass(num_others, accepted)]
        if not self.grouped:  # plain speculation knows no probes
            classes = [BatchClass(num_probes + num_others, accepted)]
        sizes = allot(
            self.rule,
            ModelledStep(cost, context_tokens, self._step_times),
            classes,
            self._limits(),
            thresholds=MIXTURE if cost.model.num_experts else DENSE,
        )
        return Sizes(sizes[0], sizes[-1])

    def _limits(self) -> DraftLimits:
        if self.plain is not None:
            return DraftLimits(tuple(range(self.plain.max_depth + 1)))
        return LIMITS if self.grouped else LINES


class Sizes(NamedTuple):
    """Sizes of the drafts of probes and of the others."""

    probes: DraftSize
    others: DraftSize


@dataclass(frozen=True, slots=True)
class ModelledStep:
    """An instance's cost at a given amount of context, as the budget's `StepCost`."""

    cost: InstanceCost
    context_tokens: float
    times: dict[tuple[int, float], StepTime]
    """Computed so far, for all instances of one cost."""

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        """Seconds of one step, drafting included."""
        step = self.times.get((num_requests, tokens_per_request))
        if step is None:
            step = self.cost.step(num_requests, tokens_per_request)
            self.times[num_requests, tokens_per_request] = step
        return step.base_s + step.per_context_token_s * self.context_tokens

    def draft_s(self, num_requests: int, depth: float) -> float:
        """0, because `step_s` includes it."""
        return 0.0
