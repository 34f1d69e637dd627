# SPDX-License-Identifier: Apache-2.0
"""Errors of the KV pool as one instance meets them, reported as events.

A block that the pool does not return is computed again. That counts as an error only if the pool failed or found
damage since the last report; otherwise it had evicted the block.
"""

from __future__ import annotations

from seer.kvpool.base import Pool
from seer.metrics.events import PoolErrors


class PoolErrorCounter:
    """Compares the pool's counts with those of the last report."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._troubles = pool.troubles()
        self._num_missed = 0
        self._num_bad = self._count_bad()

    def delta(self, now_s: float, instance: int, num_missed_tokens: int) -> list[PoolErrors]:
        """One event if the counts rose since the last call; `num_missed_tokens` is the engine's total so far."""
        before, self._troubles = self._troubles, self._pool.troubles()
        num_missed, self._num_missed = num_missed_tokens - self._num_missed, num_missed_tokens
        num_failed = self._troubles.num_failed - before.num_failed
        num_corrupt = self._troubles.num_corrupt - before.num_corrupt
        num_recomputed = 0
        if num_missed:  # counts over all processes take a lock, so they are read only then
            num_bad, self._num_bad = self._num_bad, self._count_bad()
            num_recomputed = num_missed if self._num_bad > num_bad else 0
        if not (num_failed or num_corrupt or num_recomputed):
            return []
        return [PoolErrors(now_s, instance, num_failed, num_corrupt, num_recomputed)]

    def _count_bad(self) -> int:
        stats = self._pool.stats()
        return stats.num_failed + stats.num_corrupt
