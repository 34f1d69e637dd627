# SPDX-License-Identifier: Apache-2.0
"""Counts and durations of the pool calls of one process, for backends that keep none of their own.

Invariant: every method may be called from any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator

from seer.kvpool.base import Latency, PoolStats, PoolTroubles

_KEPT = 1000  # durations kept per call: enough for a 99th percentile, and of the recent past


class Tally:
    """Names are those of PoolStats, without `num_` where they have it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def add(self, **amounts: int) -> None:
        """Add to counters."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    @contextlib.contextmanager
    def timed(self, call: str) -> Iterator[None]:
        """Note how long the block of a `with` took."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._calls[call] += 1
                self._times[call].append(time.perf_counter() - start)

    def troubles(self) -> PoolTroubles:
        """What went wrong so far."""
        with self._lock:
            return PoolTroubles(num_failed=self._counts["failed"], num_corrupt=self._counts["corrupt"])

    def stats(self, backend: str) -> PoolStats:
        """Everything so far."""
        with self._lock:
            counts = defaultdict(int, self._counts)
            latency = {call: _latency(self._calls[call], sorted(times)) for call, times in self._times.items()}
        return PoolStats(
            backend=backend,
            num_put=counts["put"],
            num_duplicate=counts["duplicate"],
            num_refused=counts["refused"],
            num_hit_dram=counts["hit"],
            num_miss=counts["miss"],
            num_corrupt=counts["corrupt"],
            num_freed=counts["freed"],
            num_failed=counts["failed"],
            bytes_put=counts["bytes_put"],
            bytes_got=counts["bytes_got"],
            latency=latency,
        )


def _latency(num_calls: int, ordered: list[float]) -> Latency:
    last = len(ordered) - 1
    return Latency(num_calls=num_calls, p50_s=ordered[last // 2], p99_s=ordered[int(0.99 * last)])
