# SPDX-License-Identifier: Apache-2.0
"""The pool of a simulated fleet as two tiers: DRAM that holds so much, and one SSD below it.

KV is counted in tokens and by request. A chunk's end saves its request's KV to DRAM; what was used longest ago moves
down to the SSD, whose writes cost nothing here (they overlap with steps, and are slower than no reader). Reads come one
after the other. KV that fits neither tier is dropped and computed again.

Invariants
  1. Each tier holds no more than its size. KV of a request is in one tier only.
  2. The SSD reads one request at a time, in the order asked.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """Sizes of the tiers, and how fast the SSD reads."""

    dram_tokens: int
    ssd_tokens: int
    ssd_tokens_s: float
    """Tokens whose KV it reads per second."""


class PoolTiers:
    """Where the KV of each waiting request is."""

    def __init__(self, shape: PoolShape) -> None:
        self._shape = shape
        self._dram: OrderedDict[int, int] = OrderedDict()  # request -> tokens, used longest ago first
        self._ssd: OrderedDict[int, int] = OrderedDict()
        self._dram_tokens = self._ssd_tokens = 0
        self._read_until_s = 0.0
        self._arrives_s: dict[int, float] = {}  # request in DRAM -> when its KV has come from the SSD
        self.num_read_ahead = self.num_read_late = self.num_dropped = 0
        """Requests whose KV was prefetched, was read from SSD when their chunk had started, or found no room."""

    def save(self, request: int, num_tokens: int) -> None:
        """A chunk has ended: its KV is the newest in DRAM."""
        self.free(request)
        self._to_dram(request, num_tokens)

    def free(self, request: int) -> None:
        """The request has ended, or its KV is replaced."""
        self._dram_tokens -= self._dram.pop(request, 0)
        self._ssd_tokens -= self._ssd.pop(request, 0)
        self._arrives_s.pop(request, None)

    def prefetch(self, request: int, now_s: float) -> None:
        """Begin to read the request's KV from SSD, if it is there."""
        if request in self._ssd:
            self.num_read_ahead += 1
            self._read(request, now_s)

    def load_s(self, request: int, now_s: float) -> float | None:
        """Seconds until the request's KV is in DRAM; None if the pool does not hold it."""
        if request in self._ssd:
            self.num_read_late += 1
            self._read(request, now_s)
        if request not in self._dram:
            return None
        self._dram.move_to_end(request)
        return max(0.0, self._arrives_s.get(request, 0.0) - now_s)

    def _read(self, request: int, now_s: float) -> None:
        num_tokens = self._ssd.pop(request)
        self._ssd_tokens -= num_tokens
        self._read_until_s = max(self._read_until_s, now_s) + num_tokens / self._shape.ssd_tokens_s
        self._to_dram(request, num_tokens)
        self._arrives_s[request] = self._read_until_s

    def _to_dram(self, request: int, num_tokens: int) -> None:
        self._dram[request] = num_tokens
        self._dram_tokens += num_tokens
        while self._dram_tokens > self._shape.dram_tokens:
            oldest, tokens = self._dram.popitem(last=False)
            self._dram_tokens -= tokens
            self._arrives_s.pop(oldest, None)
            if self._ssd_tokens + tokens > self._shape.ssd_tokens:
                self.num_dropped += 1
            else:
                self._ssd[oldest] = tokens
                self._ssd_tokens += tokens

    def check(self) -> None:
        """Assert the invariants, for tests."""
        assert self._dram_tokens == sum(self._dram.values()) <= self._shape.dram_tokens, "DRAM holds too much"
        assert self._ssd_tokens == sum(self._ssd.values()) <= self._shape.ssd_tokens, "the SSD holds too much"
        assert not self._dram.keys() & self._ssd.keys(), "a request is in both tiers"
        assert self._arrives_s.keys() <= self._dram.keys(), "KV is on its way to nowhere"
