# SPDX-License-Identifier: Apache-2.0
"""How often a process may be restarted, and how long to wait before: a number per hour, with growing pauses.

A process that dies at once after each start uses its budget up within minutes. One that is killed now and then over
days always comes back.

Pure: the caller passes the time in.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 3600.0
"""Restarts older than this no longer count."""
LONGEST_PAUSE_S = 60.0


class RestartBudget:
    """The restarts of one process."""

    def __init__(self, max_restarts: int, first_pause_s: float = 1.0) -> None:
        """The first restart in the window comes at once, the second after this pause; each further pause is doubled."""
        self._max_restarts = max_restarts
        self._first_pause_s = first_pause_s
        self._times_s: deque[float] = deque()

    def pause_s(self, now_s: float) -> float | None:
        """Seconds to wait before the next restart; None if the budget is used up."""
        self._forget_old(now_s)
        if len(self._times_s) >= self._max_restarts:
            return None
        num_doublings = min(len(self._times_s) - 1, 63)  # beyond that a float gets too large
        return min(LONGEST_PAUSE_S, self._first_pause_s * 2**num_doublings) if self._times_s else 0.0

    def spend(self, now_s: float) -> None:
        """Count a restart."""
        self._times_s.append(now_s)

    def renewed_in_s(self, now_s: float) -> float | None:
        """Seconds until a budget that is used up allows a restart again; None if it never does."""
        return self._times_s[0] + WINDOW_S - now_s if self._times_s else None

    def _forget_old(self, now_s: float) -> None:
        while self._times_s and self._times_s[0] + WINDOW_S <= now_s:
            self._times_s.popleft()
