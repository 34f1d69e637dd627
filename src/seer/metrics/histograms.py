# SPDX-License-Identifier: Apache-2.0
"""Histograms with fixed bounds: what Prometheus counts, without its client on the path of an event."""

from __future__ import annotations

from bisect import bisect_left

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600)
"""From a step of a small model to the rollout of a long tail."""
TOKENS = tuple(1 << exponent for exponent in range(18))
"""Lengths of responses: each bound is twice the one before."""


class Histogram:
    """Counts values between bounds; the last count is of those above all."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """Upper bounds and how many values are not above them, as Prometheus wants them."""
        rows, so_far = [], 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            so_far += count
            rows.append(("+Inf" if bound is None else str(float(bound)), so_far))
        return rows
