"""What a step costs on this instance by requests and draft tokens allowed, learned from its steps.

A line through all of them says what was never tried; where a depth was tried with about as many requests, its own
steps say how far it is off the line. Both are needed: stairs and kinks (captured shapes, the row where a product
becomes bound by arithmetic) are no lines, and a decision needs a price for depths that were never made.

    seconds = base + per_request·B  +  (extra + extra_per_request·B + per_token·B·depth  where it drafts)

The extra is real on GPUs: steps without drafts run several at a time as one captured graph, a step with drafts stops to
hear what was accepted and to ask for the next ones, request by request. The depth is what was allowed, not what was
drafted: that is what is decided, and shapes are padded to it.

Errors count in proportion to the step, so a stall (the first step of a new shape compiles and captures what later ones
reuse, and may take a hundred times as long) hardly moves the line. Steps that also computed prompts are left out.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from seer.engine.drafter import StepReport

REMEMBERED = 16
"""Steps of each depth."""
HALF_LIFE_REPORTS = 512.0
REFIT_REPORTS = 8
"""With drafts; those without say little new, and an eighth as often is enough."""
STALL_RATIO = 4.0
"""Times what a step with drafts should have cost: beyond this it was held up by something else."""
MAX_STALLS = 8
"""Running: drafts of one request alone come in as many sizes, and each is captured when it first comes."""
NEAR = 1.5
"""Steps with up to so many times more or fewer requests tell how far a depth is off the line."""
_RIDGE = 0.005
"""Shares what cannot be told apart yet, and keeps a few steps from saying too much."""
_LINE_WEIGHT = 2.0
"""Of the line against steps of the depth itself, in steps."""

Step = tuple[float, float, float, float, float]
"""Requests, whether it drafted, draft tokens allowed in all, seconds, number of the report."""


class MeasuredCost:
    """Implements `seer.speculation.budget.StepCost`."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[Step]] = {}  # by depth
        self.num_plain = self.num_drafting = 0
        """Reports of either kind that taught something."""
        self._num_since_fit = 0.0
        self._num_stalls = 0  # running
        self._terms: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0, 0.0)
        self._off_line: dict[int, list[tuple[float, float, float]]] = {}  # depth -> requests, ratio to line, weight
        self._priced: dict[tuple[int, float], float] = {}  # until the next fit

    def learn(self, report: StepReport) -> None:
        """One more step."""
        if report.num_prefill_rows or not report.num_rows:
            return
        depth = report.num_allowed or -(-report.num_drafted // report.num_running)
        if depth and self._is_stall(report, depth):
            return
        number = float(self.num_plain + self.num_drafting)
        step = (
            float(report.num_running),
            float(depth > 0),
            float(report.num_running * depth),
            report.duration_s,
            number,
        )
        self._steps.setdefault(depth, deque(maxlen=REMEMBERED)).append(step)
        if depth:
            self.num_drafting += 1
        else:
            self.num_plain += 1
        self._num_since_fit += 1 if depth else 1 / 8
        if self._num_since_fit >= REFIT_REPORTS or number < 4 * REFIT_REPORTS:
            self._fit()
            self._num_since_fit = 0.0

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        """Seconds of one step, the drafts' making included."""
        key = (num_requests, tokens_per_request)
        seconds = self._priced.get(key)
        if seconds is None:
            seconds = self._priced[key] = self._price(num_requests, tokens_per_request - 1)
        return seconds

    def draft_s(self, num_requests: int, depth: float) -> float:
        """Nothing more: only the whole is measured."""
        return 0.0

    def _is_stall(self, report: StepReport, depth: int) -> bool:
        """Whether something else held the step up, rather than that drafting has come to cost this much."""
        if not self.num_plain:
            return False
        # A request alone costs more with a draft than where none was found; rows are no dearer than requests are.
        usual_s = self.step_s(report.num_running, 1) * report.num_rows / report.num_running
        if self.num_drafting:
            usual_s = max(usual_s, self.step_s(report.num_running, 1 + depth))
        if report.duration_s <= STALL_RATIO * usual_s:
            self._num_stalls = 0
            return False
        self._num_stalls += 1
        return self._num_stalls <= MAX_STALLS

    def _price(self, num_requests: int, depth: float) -> float:
        base_s, per_request_s, extra_s, extra_per_request_s, per_token_s = self._terms
        line_s = base_s + per_request_s * num_requests
        if depth:
            line_s += extra_s + (extra_per_request_s + per_token_s * depth) * num_requests
        near = [(1.0, _LINE_WEIGHT)]
        for requests, ratio, weight in self._off_line.get(round(depth), ()):
            if requests <= NEAR * num_requests and num_requests <= NEAR * requests:
                near.append((ratio, weight))
        return line_s * _usual(near)

    def _fit(self) -> None:
        steps = np.array([step for seen in self._steps.values() for step in seen])
        requests, drafts, drafted, seconds, numbers = steps.T
        # In units of a step, the most requests and the most tokens, so that one ridge suits all terms.
        scales = np.array([1.0, requests.max(), 1.0, requests.max(), max(1.0, drafted.max())])
        known = np.stack([np.ones_like(requests), requests, drafts, drafts * requests, drafted], axis=1) / scales
        unit_s = float(np.median(seconds))
        weights = 0.5 ** ((numbers.max() - numbers) / HALF_LIFE_REPORTS)
        terms = _relative_fit(known, seconds / unit_s, weights)
        self._terms = tuple((terms * unit_s / scales).tolist())
        ratios = seconds / (known @ terms * unit_s)
        self._off_line = {depth: [] for depth in self._steps}
        depths = (depth for depth, seen in self._steps.items() for _ in seen)
        for depth, *off in zip(depths, requests.tolist(), ratios.tolist(), weights.tolist(), strict=True):
            if depth or off[1] < STALL_RATIO:
                self._off_line[depth].append((off[0], off[1], off[2]))
        self._priced.clear()


def _usual(weighted: list[tuple[float, float]]) -> float:
    """The mean without stalls: what is far beyond the median does not count, unless it is what most came to."""
    half, median = sum(weight for _, weight in weighted) / 2, math.inf
    for value, weight in sorted(weighted):
        half -= weight
        if half <= 0.0:
            median = value
            break
    counted = [(value, weight) for value, weight in weighted if value <= STALL_RATIO * median]
    return sum(value * weight for value, weight in counted) / sum(weight for _, weight in counted)


def _relative_fit(
    known: NDArray[np.float64], values: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Terms of 0 or more with the least squares of errors relative to the values."""
    weighted = known * (np.sqrt(weights) / values)[:, None]
    moments = weighted.T @ weighted + np.diag([1e-9, *[_RIDGE] * (known.shape[1] - 1)])
    targets = weighted.T @ np.sqrt(weights)
    terms = np.zeros(known.shape[1])
    kept = list(range(len(terms)))
    while True:
        solved = np.linalg.solve(moments[np.ix_(kept, kept)], targets[kept])
        if solved.min() >= 0.0:
            terms[kept] = solved
            return terms
        kept.pop(int(solved.argmin()))  # noise: it costs nothing within what was seen
