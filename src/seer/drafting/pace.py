# SPDX-License-Identifier: Apache-2.0
"""How often an engine calls the draft client: there is no use in fetching siblings' tokens more often.

An engine on a GPU calls every few milliseconds, one on a CPU about every fifty. On a CPU the thread that talks to the
draft server takes its time from the core that computes. Pure: the caller passes the time.
"""

from __future__ import annotations

SLOWEST_S = 0.1
"""Longest interval, for engines slower than this: siblings elsewhere should not wait longer for tokens."""
PAUSE_S = 1.0
"""A longer time between two calls is idleness, not the engine's pace."""
WEIGHT = 0.125
"""Of a new interval in the mean: about the last eight count."""


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
