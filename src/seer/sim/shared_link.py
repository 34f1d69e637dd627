# SPDX-License-Identifier: Apache-2.0
"""A link in virtual time whose transfers share its bandwidth equally.

With n transfers under way each gets 1/n of the bandwidth. `_served` is what a transfer that had always been under way
would have got; a transfer ends when that has grown by its bytes since it began.

A transfer whose bytes came up over time is sent when the last of them is there, with the time of the first: what fits
into the idle time of the link since then has gone already, and only the rest is under way.

Invariants
  1. Bytes are moved at the full bandwidth while any transfer is under way; idle time is used once at most.
  2. A transfer ends after one that began no later and has no more bytes left.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable

_EPSILON_BYTES = 1.0
"""Less than this is left of a transfer only by rounding."""


class SharedLink:
    """One direction of a node's network card, or a node's memory."""

    def __init__(self, bandwidth_bytes_s: float) -> None:
        self._bandwidth_bytes_s = bandwidth_bytes_s
        self._served = 0.0
        self._at_s = 0.0
        self._running: list[tuple[float, int, Callable[[], None]]] = []  # heap by `_served` at the end
        self._num_begun = 0
        self._idle_bytes = 0.0  # that could have gone while no transfer was under way
        self._timer: asyncio.TimerHandle | None = None
        self.busy_s = 0.0
        """At the full bandwidth."""
        self.num_bytes = 0.0
        """Of the transfers that were begun."""

    def send(self, num_bytes: float, done: Callable[[], None], *, since_s: float = math.inf) -> float:
        """Transfer what came up since then; `done` is called at the end. Returns the bytes that went before."""
        self._advance()
        self._num_begun += 1
        self.num_bytes += num_bytes
        gone = self._sent_before(num_bytes, since_s)
        heapq.heappush(self._running, (self._served + num_bytes - gone, self._num_begun, done))
        self._set_timer()
        return gone

    def _sent_before(self, num_bytes: float, since_s: float) -> float:
        most = max(0.0, self._at_s - since_s) * self._bandwidth_bytes_s
        gone = min(num_bytes, self._idle_bytes, most)
        self._idle_bytes -= gone
        self.busy_s += gone / self._bandwidth_bytes_s
        return gone

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        elapsed_s = now_s - self._at_s
        if self._running:
            self._served += elapsed_s * self._bandwidth_bytes_s / len(self._running)
            self.busy_s += elapsed_s
        else:
            self._idle_bytes += elapsed_s * self._bandwidth_bytes_s
        self._at_s = now_s

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            left = max(0.0, self._running[0][0] - self._served)
            wait_s = left * len(self._running) / self._bandwidth_bytes_s
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._end_due)

    def _end_due(self) -> None:
        self._timer = None
        self._advance()
        while self._running and self._running[0][0] <= self._served + _EPSILON_BYTES:
            heapq.heappop(self._running)[2]()
        self._set_timer()
