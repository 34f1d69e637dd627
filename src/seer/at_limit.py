# SPDX-License-Identifier: Apache-2.0
"""Whether many responses end at their limit, so that any of those that still run may.

Requests with far smaller limits say nothing of the others: one that is to generate a single token, for its score, ends
there always. So only responses with the largest limits count: those of at least an eighth of the longest, or a quarter,
as powers of two fall.

One object serves all rollouts of a training run, as `seer.spread` does.

Invariants
  1. Where all limits are of one size, every response counts.
  2. What is said changes only after an eighth more of those that count have ended, or when others count than before.
  3. Of fewer than `LEAST_ENDED` responses nothing is said.
"""

from __future__ import annotations

from seer.request import Request

LIMIT_SHARE = 0.03
"""The limit binds where at least this share of the responses end there. Where 5% to 18% do, a rollout is up to a tenth
faster for it, and 3% slower if groups are correlated 0.95; where 0.5% do, it would be up to a tenth slower
(docs/log.md)."""
NUM_SIZES = 3
"""Powers of two that count. Nobody gives responses that are to be alike limits that differ by more."""
LEAST_ENDED = 16
"""Responses that end before anything is said."""
MOST_JUDGED = 16_384.0
"""Responses that are remembered: with more, what is known counts half, for sessions that go on and on. More than a
rollout has: its longest responses end last, and would count for too many."""


class LimitCount:
    """Responses that have ended, and of them those at their limit, by the size of the limit: its power of two."""

    def __init__(self) -> None:
        self.binds = False
        """Whether many of those that count have ended at their limit."""
        self._ended: dict[int, float] = {}
        self._at_limit: dict[int, float] = {}
        self._largest = 0  # size; the smallest that counts follows from it
        self._next_judged = float(LEAST_ENDED)  # number of ended responses that count

    def observe(self, request: Request) -> None:
        """A request has ended by itself."""
        size = request.max_tokens.bit_length()
        self._ended[size] = self._ended.get(size, 0.0) + 1
        self._at_limit[size] = self._at_limit.get(size, 0.0) + (request.num_generated >= request.max_tokens)
        # A size of which less than one is left does not count: a single long limit is not the measure for ever.
        largest = max(size for size, num in self._ended.items() if num >= 1)
        num_ended = self._counted(self._ended, largest)
        if largest != self._largest or num_ended >= self._next_judged:
            self._largest = largest
            num_at_limit = self._counted(self._at_limit, largest)
            self.binds = num_ended >= LEAST_ENDED and num_at_limit >= LIMIT_SHARE * num_ended
            self._next_judged = max(LEAST_ENDED, num_ended * 9 / 8)
            if sum(self._ended.values()) > MOST_JUDGED:
                self.fade()

    def fade(self) -> None:
        """What is known counts half."""
        for counts in (self._ended, self._at_limit):
            counts.update({size: num / 2 for size, num in counts.items()})
        self._next_judged = max(LEAST_ENDED, self._counted(self._ended, self._largest) * 9 / 8)

    @staticmethod
    def _counted(counts: dict[int, float], largest: int) -> float:
        return sum(num for size, num in counts.items() if size > largest - NUM_SIZES)
