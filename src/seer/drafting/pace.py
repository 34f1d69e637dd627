"""How often an engine learns and drafts: more often than that nobody needs to hear of siblings.

A GPU's engine calls every few milliseconds, a CPU's every fifty, and there the thread that talks to the draft server
runs on the core that computes. Pure: whoever calls brings the time.
"""

from __future__ import annotations

SLOWEST_S = 0.1
"""Siblings' tokens are asked for this often however slow the engine is."""
PAUSE_S = 1.0
"""Between two calls further apart the engine had nothing to do."""
WEIGHT = 0.125
"""Of a new interval in the mean."""


class Pace:
    """The mean time between an engine's calls; written by its thread, read by another."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._mean_s = 0.0

    def called(self, now_s: float) -> None:
        """The engine has called."""
        if self._last_s is not None and now_s - self._last_s < PAUSE_S:
            self._mean_s += WEIGHT * (now_s - self._last_s - self._mean_s)
        self._last_s = now_s

    def interval(self, least_s: float) -> float:
        """An interval as long as the engine's own, or `least_s` where that is longer."""
        return max(least_s, min(self._mean_s, SLOWEST_S))
