"""The ordering of `seer`: what goes first depends on what there is too little of.

Everybody waits for the last response, and no estimate says for certain which one that will be: the first of a group to
finish is its shortest, and where tails are heavy a runaway hides in any group.

* *Memory is scarce.* The request with the most tokens left to its limit goes first, that is the one least far along: it
  needs the least memory and may still become the longest. All are begun early, the short ones end and make room, and
  what is left at the end runs side by side. Of equals, the one of the group expected to be longest. Where an earlier
  weights version has told the group's length, that takes the limit's place: it is the longest of a whole group.
* *Sequence slots are scarce.* A request takes one sequence slot however long it is, so there is nothing to gain by
  running many short
  ones: the one expected to need the most goes first, and one that is further along is not displaced by its like.
* *There is no pool.* A paused request is computed again, so one that was begun goes on before one that was not.

In each, of equals one of each group comes before the second of any, so that every group's length is known soon.
"""

from __future__ import annotations

from collections.abc import Sequence

from seer.buffer import Request
from seer.context import Context
from seer.scheduling.estimated_rank import EstimatedRank
from seer.scheduling.fixed_rank import Rank
from seer.scheduling.longest_first import rank_by_remaining

LEVEL_RATIO = 1.25
"""Requests whose needs differ by less than about this do not displace each other."""
OVERRUN = 2.0
"""A request that outran its group's estimate is expected to need so many times its present length again: lengths have
heavy tails."""


class MemoryOrSlotOrdering:
    """Two orders of the same waiting requests; `memory_is_scarce` says which one counts."""

    def __init__(self, context: Context, *, has_pool: bool = True) -> None:
        self._context = context
        self._has_pool = has_pool
        self.memory_is_scarce = True
        """And not sequence slots. To be set before each decision."""
        self._by_memory = EstimatedRank(context, self._least_far_along if has_pool else self._begun_first)
        self._by_slots: EstimatedRank | None = (
            None  # made when sequence slots are first scarce: many runs never need it
        )

    def admit(self, requests: Sequence[Request]) -> None:
        """These requests wait."""
        for request in requests:
            self.push(request)

    def push(self, request: Request) -> None:
        """The request waits."""
        self._by_memory.push(request)
        if self._by_slots is not None:
            self._by_slots.push(request)

    def peek(self) -> Request | None:
        """The best by what is scarce now."""
        return self._by_memory.peek() if self._memory_counts() else self._slots().peek()

    def pop(self) -> Request:
        """Take it."""
        if self._memory_counts():
            request = self._by_memory.pop()
            if self._by_slots is not None:
                self._by_slots.take(request)
        else:
            request = self._slots().pop()
            self._by_memory.take(request)
        return request

    def granted(self, request: Request, num_tokens: int) -> None:
        """What it needs does not change."""

    def finished(self, request: Request) -> None:
        """Its length may change what is expected of its siblings."""
        self._by_memory.finished(request)
        if self._by_slots is not None:
            self._by_slots.finished(request)

    def _memory_counts(self) -> bool:
        return self.memory_is_scarce or not self._has_pool

    def _slots(self) -> EstimatedRank:
        if self._by_slots is None:
            self._by_slots = EstimatedRank(self._context, self._longest_expected)
            self._by_slots.admit(self._by_memory.waiting())
        return self._by_slots

    def _least_far_along(self, request: Request) -> Rank:
        context, group = self._context, request.group
        left = (
            expected_remaining_tokens(context, request) if context.has_length_hint(group) else request.remaining_limit
        )
        return (-left, -context.expected_tokens(group), request.index, request.id)

    def _longest_expected(self, request: Request) -> Rank:
        return rank_by_remaining(request, expected_remaining_tokens(self._context, request), LEVEL_RATIO)

    def _begun_first(self, request: Request) -> Rank:
        return (-request.num_generated, -self._context.expected_tokens(request.group), request.index, request.id)


def expected_remaining_tokens(context: Context, request: Request) -> float:
    """Tokens the request is expected to need yet: its group's estimate, stretched where it has outrun that."""
    expected, num_generated = context.expected_tokens(request.group), request.num_generated
    if not num_generated:
        return float(expected)
    stretched = min(num_generated * (1.0 + OVERRUN), request.max_tokens)
    return float(max(expected, stretched) - num_generated)
