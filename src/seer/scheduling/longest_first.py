"""Longest remaining first, for those who know how many tokens a request still needs: the ordering of the `oracle`.

Of two requests that could run now, the one with more to do goes first, so that all end as near to each other as the
memory allows. Of equals, one of each group comes before the second of any, so that every group's length is known soon;
then the lower request id. `memory_or_slot` is for those who do not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from seer.buffer import Request
from seer.scheduling.fixed_rank import FixedRank, Rank


class LongestRemainingFirst(FixedRank):
    """Ordered by what each request is known to need."""

    def __init__(self, remaining_tokens: Callable[[Request], float], *, level_ratio: float = 1.0) -> None:
        super().__init__()
        self._remaining_tokens = remaining_tokens
        self._level_ratio = level_ratio

    def rank(self, request: Request) -> Rank:
        """By remaining tokens, in levels."""
        return rank_by_remaining(request, self._remaining_tokens(request), self._level_ratio)


def rank_by_remaining(request: Request, remaining_tokens: float, level_ratio: float) -> Rank:
    """(minus the level of remaining tokens, minus tokens generated, place among its siblings, id).

    Levels are `level_ratio` apart. Within a level the request that is further along goes on, so that requests with
    nearly equal needs do not take turns on the same memory; a ratio of 1 means that every token counts.
    """
    level = max(1.0, remaining_tokens)
    if level_ratio > 1.0:
        level = math.floor(math.log(level) / math.log(level_ratio))
    return (-level, -request.num_generated, request.index, request.id)
