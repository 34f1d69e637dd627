"""What a step costs on this instance, learned from its steps: base + slope·rows, and a fixed extra where it drafts.

The extra is real on GPUs: steps without drafts run several at a time as one captured graph, a step with drafts stops to
hear what was accepted and to ask for the next drafts. Charging it to the rows would make deep drafts look dear and
shallow ones cheap, when it is the other way round.

Steps that also computed prompts are left out: their rows are of another kind. Old steps count less and less.
"""

from __future__ import annotations

import numpy as np

from seer.engine.drafter import StepReport

DECAY = 0.98
MIN_STEPS = 12
_RIDGE = 1e-6
"""Keeps the fit solvable while every drafting step has had the same size."""


class MeasuredCost:
    """A least-squares fit with decay. Implements `seer.speculation.budget.StepCost`."""

    def __init__(self) -> None:
        self._moments = np.zeros((3, 3))  # of (1, rows, drafts)
        self._products = np.zeros(3)  # of the same with the step's seconds
        self._num_steps = 0
        self._fit: tuple[float, float, float] | None = None

    @property
    def is_known(self) -> bool:
        """Whether steps of different sizes have been seen."""
        weight, rows, rows2 = self._moments[0, 0], self._moments[0, 1], self._moments[1, 1]
        return self._num_steps >= MIN_STEPS and bool(rows2 * weight - rows * rows > 1e-3 * max(1.0, rows2 * weight))

    def learn(self, report: StepReport) -> None:
        """One more step."""
        if report.num_prefill_rows or not report.num_rows:
            return
        step = np.array([1.0, float(report.num_rows), 1.0 if report.num_drafted else 0.0])
        self._moments = self._moments * DECAY + np.outer(step, step)
        self._products = self._products * DECAY + step * report.duration_s
        self._num_steps += 1
        self._fit = None

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        """Seconds of one step, the drafts' making included."""
        if not self.is_known:
            return 1.0 + num_requests * (tokens_per_request - 1)  # pessimistic: every row costs a step
        base_s, per_row_s, _ = self._solved()
        return base_s + per_row_s * num_requests * tokens_per_request

    def draft_s(self, num_requests: int, depth: float) -> float:
        """What drafting costs beyond the rows it adds."""
        return self._solved()[2] if depth and self.is_known else 0.0

    def _solved(self) -> tuple[float, float, float]:
        if self._fit is None:
            base_s, per_row_s, extra_s = self._solve([0, 1, 2])
            if per_row_s < 0.0:  # noise: rows are free within what was seen
                base_s, extra_s = self._solve([0, 2])
                per_row_s = 0.0
            if extra_s < 0.0:
                base_s, per_row_s = self._solve([0, 1])
                extra_s = 0.0
            self._fit = (max(1e-6, base_s), max(0.0, per_row_s), max(0.0, extra_s))
        return self._fit

    def _solve(self, terms: list[int]) -> list[float]:
        moments = self._moments[np.ix_(terms, terms)]
        ridge = np.diag(np.diag(moments) * _RIDGE + 1e-12)
        return [float(value) for value in np.linalg.solve(moments + ridge, self._products[terms])]
