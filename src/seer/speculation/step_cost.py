# SPDX-License-Identifier: Apache-2.0
"""The cost of a step on this instance, fitted to its own steps: base + slope·batched tokens, plus an extra for drafts.

The extra is a fixed time per step with drafts. On a GPU, steps without drafts run several at a time without the host.
A step with drafts waits for the host, which reads the accepted tokens and makes the next drafts. Without this term,
that time would be spread over the batched tokens: deep drafts would look too expensive and shallow ones too cheap.

Steps that also prefilled are not used: their tokens cost differently. Nor are stalls: the first step of a new shape
compiles and captures, and may take a hundred times as long. The fit uses the newest reports with and without drafts, so
that a long time with drafts does not remove the reports without. A report of several steps counts as many times.

Until there are enough steps of both kinds, the cost is that of `start`, a profile that was measured earlier.
"""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np

from seer.speculation.step_report import StepReport
from seer.speculation.throughput import StepCost

WINDOW_REPORTS = 64
"""Kept with drafts, and as many without: enough to average noise, few enough to follow a growing context."""
MIN_STEPS = 4
"""Needed with drafts, and as many without, before the cost counts as known."""
REFIT_STEPS = 8
"""New steps before the next fit: the budget asks several times per step, and a fit changes little with one step."""
STALL_RATIO = 4.0
"""A step that took this many times the median of its kind was delayed by something else."""
_RIDGE = 1e-6
"""Keeps the fit solvable while all steps with drafts have had the same size."""

Step = tuple[float, float, float, float, int]
"""1, batched tokens, whether it had drafts, seconds; number of steps."""


class MeasuredCost:
    """A least-squares fit over recent steps. Implements `seer.speculation.throughput.StepCost`."""

    def __init__(self, start: StepCost | None = None) -> None:
        self._start = start
        self._start_s: dict[tuple[int, float], float] = {}  # a profile interpolates: too slow for several times a step
        self._plain: deque[Step] = deque(maxlen=WINDOW_REPORTS)
        self._drafting: deque[Step] = deque(maxlen=WINDOW_REPORTS)
        self._since_fit = 0
        self._fit: tuple[float, float, float] | None = None

    @property
    def is_known(self) -> bool:
        """Whether there have been enough steps with drafts and without, or the start is known."""
        return self._solved() is not None or self._start is not None

    def learn(self, report: StepReport) -> None:
        """Add a report."""
        if report.num_prefill_tokens or report.has_captured or not report.num_batched_tokens:
            return
        drafts = 1.0 if report.num_drafted else 0.0
        kind = self._drafting if report.num_drafted else self._plain
        kind.append((1.0, float(report.num_batched_tokens), drafts, report.duration_s, report.num_steps))
        self._since_fit += report.num_steps

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        """Seconds of one step without `draft_s`. Very high for drafts while the cost is unknown."""
        fit = self._solved()
        if fit is None and self._start is not None:
            shape = (num_requests, tokens_per_request)
            if shape not in self._start_s:
                self._start_s[shape] = self._start.step_s(*shape)
            return self._start_s[shape]
        if fit is None:
            return 1.0 + num_requests * (tokens_per_request - 1)  # every draft token costs as much as a step
        return fit[0] + fit[1] * num_requests * tokens_per_request

    def draft_s(self, num_requests: int, depth: float) -> float:
        """Seconds that drafting costs besides the tokens it adds."""
        fit = self._solved()
        if fit is None:
            return self._start.draft_s(num_requests, depth) if self._start is not None else 0.0
        return fit[2] if depth else 0.0

    def _solved(self) -> tuple[float, float, float] | None:
        # Called several times per step: fit again only after new steps.
        if self._since_fit >= (1 if self._fit is None else REFIT_STEPS):
            self._fit = self._solve()
            self._since_fit = 0
        return self._fit

    def _solve(self) -> tuple[float, float, float] | None:
        if min(_count(self._plain), _count(self._drafting)) < MIN_STEPS:
            return None
        steps = np.array([*_without_stalls(self._plain), *_without_stalls(self._drafting)])
        base_s, per_batched_token_s, extra_s = _least_squares(steps, [0, 1, 2])
        if per_batched_token_s < 0.0:  # noise: within the measured range, tokens cost nothing
            base_s, extra_s = _least_squares(steps, [0, 2])
            per_batched_token_s = 0.0
        if extra_s < 0.0:
            base_s, per_batched_token_s = _least_squares(steps, [0, 1])
            extra_s = 0.0
        return max(1e-6, base_s), max(0.0, per_batched_token_s), max(0.0, extra_s)


def _count(reports: deque[Step]) -> int:
    return sum(report[4] for report in reports)


def _without_stalls(steps: deque[Step]) -> list[Step]:
    if not steps:
        return []
    limit_s = STALL_RATIO * statistics.median(step[3] for step in steps)
    return [step for step in steps if step[3] <= limit_s]


def _least_squares(steps: np.ndarray[tuple[int, int], np.dtype[np.float64]], terms: list[int]) -> list[float]:
    known, counts = steps[:, terms], steps[:, 4:]
    moments = known.T @ (known * counts)
    ridge = np.diag(np.diag(moments) * _RIDGE + 1e-12)
    return [float(value) for value in np.linalg.solve(moments + ridge, known.T @ (steps[:, 3] * steps[:, 4]))]
