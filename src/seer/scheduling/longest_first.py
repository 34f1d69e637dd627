# SPDX-License-Identifier: Apache-2.0
"""Longest remaining first, where the remaining length of each request is known: the ordering of the oracles.

The request with the most remaining tokens runs first, so that all end at about the same time. Of requests with equal
need, the first of each group comes before the second of any, so that every group's length is known soon; then the lower
request id. memory_or_slot.py is the ordering for unknown lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from seer.buffer import Request
from seer.scheduling.fixed_rank import FixedRank, Rank


class LongestRemainingFirst(FixedRank):
    """Ordered by the known remaining tokens of each request."""

    def __init__(self, remaining_tokens: Callable[[Request], float], *, level_ratio: float = 1.0) -> None:
        super().__init__()
        self._remaining_tokens = remaining_tokens
        self._level_ratio = level_ratio

    def rank(self, request: Request) -> Rank:
        """By remaining tokens, in levels."""
        return rank_by_remaining(request, self._remaining_tokens(request), self._level_ratio)


def rank_by_remaining(request: Request, remaining_tokens: float, level_ratio: float) -> Rank:
    """(minus the level of remaining tokens, minus tokens generated, index in its group, id).

    Each level is `level_ratio` times the one below. Within a level the request that has generated more runs first, so
    that requests with nearly equal needs do not take turns on the same memory. A ratio of 1 means no levels.
    """
    return (-level_of(remaining_tokens, level_ratio), -request.num_generated, request.index, request.id)


def level_of(num_tokens: float, level_ratio: float) -> float:
    """The level of a number of tokens."""
    level = max(1.0, num_tokens)
    return math.floor(math.log(level) / math.log(level_ratio)) if level_ratio > 1.0 else level
