"""What a step costs on this instance, learned from its steps: base + slope·rows, and a fixed extra where it drafts.

The extra is real on GPUs: steps without drafts run several at a time as one captured graph, a step with drafts stops to
hear what was accepted and to ask for the next drafts. Charging it to the rows would make deep drafts look dear and
shallow ones cheap, when it is the other way round.

Steps that also computed prompts are left out: their rows are of another kind. So are stalls: the first step of a new
shape compiles and captures what later ones reuse, and may take a hundred times as long. The fit looks at the newest
reports of either kind, so that a long time with drafts does not forget what steps without them cost; a report of
several steps counts as many times.
"""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np

from seer.speculation.step_report import StepReport

WINDOW_REPORTS = 64
"""Remembered of either kind."""
MIN_STEPS = 4
"""Of either kind."""
REFIT_STEPS = 8
STALL_RATIO = 4.0
"""Times the median of its kind: beyond this a step was held up by something else."""
_RIDGE = 1e-6
"""Keeps the fit solvable while every drafting step has had the same size."""

Step = tuple[float, float, float, float, int]
"""1, rows, whether it drafted, seconds; how many there were."""


class MeasuredCost:
    """A least-squares fit over recent steps. Implements `seer.speculation.budget.StepCost`."""

    def __init__(self) -> None:
        self._plain: deque[Step] = deque(maxlen=WINDOW_REPORTS)
        self._drafting: deque[Step] = deque(maxlen=WINDOW_REPORTS)
        self._since_fit = 0
        self._fit: tuple[float, float, float] | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough steps of either kind have been seen."""
        return self._solved() is not None

    def learn(self, report: StepReport) -> None:
        """One more step."""
        if report.num_prefill_tokens or report.has_captured or not report.num_batched_tokens:
            return
        drafts = 1.0 if report.num_drafted else 0.0
        kind = self._drafting if report.num_drafted else self._plain
        kind.append((1.0, float(report.num_batched_tokens), drafts, report.duration_s, report.num_steps))
        self._since_fit += report.num_steps

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        """Seconds of one step, the drafts' making included."""
        fit = self._solved()
        if fit is None:
            return 1.0 + num_requests * (tokens_per_request - 1)  # pessimistic: every row costs a step
        return fit[0] + fit[1] * num_requests * tokens_per_request

    def draft_s(self, num_requests: int, depth: float) -> float:
        """What drafting costs beyond the rows it adds."""
        fit = self._solved()
        return fit[2] if depth and fit is not None else 0.0

    def _solved(self) -> tuple[float, float, float] | None:
        # Asked several times a step: only new steps are worth another fit.
        if self._since_fit >= (1 if self._fit is None else REFIT_STEPS):
            self._fit = self._solve()
            self._since_fit = 0
        return self._fit

    def _solve(self) -> tuple[float, float, float] | None:
        if min(_count(self._plain), _count(self._drafting)) < MIN_STEPS:
            return None
        steps = np.array([*_without_stalls(self._plain), *_without_stalls(self._drafting)])
        base_s, per_batched_token_s, extra_s = _least_squares(steps, [0, 1, 2])
        if per_batched_token_s < 0.0:  # noise: rows are free within what was seen
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
