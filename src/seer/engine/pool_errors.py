"""What the pool could not do for one instance, told as events.

A block that the pool was asked for and did not give is computed again. That is the pool's fault only where it
failed or found damage since it was last looked at; otherwise it had simply made room for others.
"""

from __future__ import annotations

from seer.kvpool.base import Pool
from seer.metrics.events import PoolTrouble


class PoolErrorCounter:
    """Compares the pool's counts with those of the last look."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._troubles = pool.troubles()
        self._num_missed = 0
        self._num_bad = self._count_bad()

    def delta(self, now_s: float, instance: int, num_missed_tokens: int) -> list[PoolTrouble]:
        """One event if anything went wrong; `num_missed_tokens` is the engine's count so far."""
        before, self._troubles = self._troubles, self._pool.troubles()
        num_missed, self._num_missed = num_missed_tokens - self._num_missed, num_missed_tokens
        num_failed = self._troubles.num_failed - before.num_failed
        num_corrupt = self._troubles.num_corrupt - before.num_corrupt
        num_recomputed = 0
        if num_missed:  # the counts of all processes cost a lock, so they are read only then
            num_bad, self._num_bad = self._num_bad, self._count_bad()
            num_recomputed = num_missed if self._num_bad > num_bad else 0
        if not (num_failed or num_corrupt or num_recomputed):
            return []
        return [PoolTrouble(now_s, instance, num_failed, num_corrupt, num_recomputed)]

    def _count_bad(self) -> int:
        stats = self._pool.stats()
        return stats.num_failed + stats.num_corrupt
