# SPDX-License-Identifier: Apache-2.0
"""How often a draft client talks to its server: no more often than its engine can use what comes.

An engine on a GPU calls every few milliseconds, one on a CPU about every fifty. On a CPU the thread that talks to the
draft server takes its time from the core that computes, and so does the server itself. Where drafts do not pay, an
engine drafts only now and then, to see whether they would, and does not use the tokens that come in between. So the
time between messages grows while nothing is drafted, and is short again from the first draft on. Pure: the caller
passes the time.
"""

from __future__ import annotations

SLOWEST_S = 0.1
"""Longest interval, for engines slower than this: siblings elsewhere should not wait longer for tokens."""
PAUSE_S = 1.0
"""A longer time between two calls is idleness, not the engine's pace."""
WEIGHT = 0.125
"""Of a new interval in the mean: about the last eight count."""
UNUSED_SHARE = 0.25
"""While nothing is drafted, the time between messages grows to this share of the time since the last draft: most of
what was generated since then has arrived before the next one, however late that is."""
UNUSED_S = 0.5
"""Longest time between messages of an engine that does not draft. Others may draft from its tokens: this is 50 to 100
steps of a GPU, and the 64 tokens after which a stream is shipped at once."""


class Pace:
    """The mean time between an engine's calls, and its last draft; written by its thread, read by another."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._mean_s = 0.0
        self._drafted_s: float | None = None

    def called(self, now_s: float) -> None:
        """The engine has called."""
        if self._last_s is not None and now_s - self._last_s < PAUSE_S:
            self._mean_s += WEIGHT * (now_s - self._last_s - self._mean_s)
        self._last_s = now_s

    def drafted(self, now_s: float) -> None:
        """The engine has asked for drafts."""
        self._drafted_s = now_s

    def interval(self, least_s: float) -> float:
        """An interval as long as the engine's own, or `least_s` where that is longer."""
        return max(least_s, min(self._mean_s, SLOWEST_S))

    def between_messages(self, least_s: float, now_s: float) -> float:
        """The same for messages: longer while nothing is drafted. Users that never draft here want all tokens soon."""
        unused_s = 0.0 if self._drafted_s is None else now_s - self._drafted_s
        return max(self.interval(least_s), min(UNUSED_SHARE * unused_s, UNUSED_S))

    def between_looks(self, least_s: float, now_s: float) -> float:
        """The same for looking whether a message is due: a first draft is noticed soon."""
        return min(self.between_messages(least_s, now_s), max(least_s, SLOWEST_S))
