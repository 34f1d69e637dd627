# SPDX-License-Identifier: Apache-2.0
"""The ordering of `seer`: it depends on whether KV memory or sequence slots are scarce.

A rollout ends with its last response, and no estimate tells which one that will be: the first response of a group to
finish is its shortest, and with heavy tails any group can contain a very long one.

* *Memory is scarce.* The request that may still need the most tokens runs first. In a group of unknown length that is
  what is left to its limit, so the request that has generated least runs first: it needs the least memory and may still
  become the longest. So all requests start early, short ones end and free memory, and the remaining ones run side by
  side at the end. From the first finish on, a group's requests may need `Context.spread` times its longest finished
  response, or, of one that has generated more than a third of that, `OVERRUN` times its present length in addition. So
  groups that look short leave memory to the others, and one that has outgrown its group goes on. Ties: the group with
  the longest estimate first. If a length hint from an earlier weights version is given for a group, it replaces the
  limit.
* *Sequence slots are scarce.* A request takes one slot however long it is. The request that is expected to need the
  most tokens runs first. Within about the same need, the one that has generated more runs first. Where many responses
  end at their limit (`Context.limit_binds`), any may: then the one with most left to its limit runs first, so that all
  get about as far, short ones end, and those that go to the limit run side by side at the end, not one after another.
* *There is no pool.* The KV of a paused request would be computed again, so the request that has generated most runs
  first.

What a request needs is the time that it takes, counted in tokens. So the tools that it will still wait for count too
(`TurnEstimates.remaining_wait_tokens`): a conversation with many calls ahead starts before one with few.

In each order the last tie-break puts the first request of every group before the second of any, so that every group's
length is known soon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from seer.buffer import Request
from seer.context import Context
from seer.scheduling.estimated_rank import EstimatedRank
from seer.scheduling.fixed_rank import Rank
from seer.scheduling.longest_first import level_of, rank_by_remaining

LEVEL_RATIO = 1.25
"""Requests whose needs differ by less than about this factor do not displace each other: each switch moves KV."""
OVERRUN = 2.0
"""A request that has exceeded its group's estimate is expected to need this many times its present length in addition:
lengths have heavy tails."""


class MemoryOrSlotOrdering:
    """Two orders of the same waiting requests; `memory_is_scarce` selects one."""

    def __init__(self, context: Context, *, has_pool: bool = True) -> None:
        self._context = context
        self._has_pool = has_pool
        self._spread = context.spread  # at which waiting requests were ranked
        self._limit_binds = context.limit_binds  # the same
        self.memory_is_scarce = True
        """Whether memory, not sequence slots, is scarce. Set before each decision."""
        self._by_memory = EstimatedRank(context, self._most_needed if has_pool else self._begun_first)
        self._by_slots: EstimatedRank | None = None  # made when slots are first scarce: many runs never need it

    def admit(self, requests: Sequence[Request]) -> None:
        """Queue new requests."""
        for request in requests:
            self.push(request)

    def push(self, request: Request) -> None:
        """Queue a request."""
        self._by_memory.push(request)
        if self._by_slots is not None:
            self._by_slots.push(request)

    def peek(self) -> Request | None:
        """The first request, by what is scarce now."""
        return self._by_memory.peek() if self._memory_counts() else self._slots().peek()

    def pop(self) -> Request:
        """Remove and return the request that `peek` shows."""
        if self._memory_counts():
            request = self._by_memory.pop()
            if self._by_slots is not None:
                self._by_slots.take(request)
        else:
            request = self._slots().pop()
            self._by_memory.take(request)
        return request

    def upcoming(self) -> Iterator[Request]:
        """The waiting requests in order, by what is scarce now."""
        return self._by_memory.upcoming() if self._memory_counts() else self._slots().upcoming()

    def granted(self, request: Request, num_tokens: int) -> None:
        """Does nothing: ranks do not depend on grants."""

    def slot_tokens(self, request: Request) -> float:
        """Tokens for which it is expected to keep its sequence slot: to its limit, where any request may go there."""
        if self._limit_binds and not self._context.has_length_hint(request.group):
            return float(request.max_tokens - request.num_generated)
        return expected_remaining_tokens(self._context, request)

    def rank(self, request: Request) -> Rank:
        """Its rank by what is scarce now, whether it waits or runs; smaller ranks run first."""
        if not self._memory_counts():
            return self._longest_expected(request)
        return self._most_needed(request) if self._has_pool else self._begun_first(request)

    def last_first(self, requests: Sequence[Request]) -> Iterator[Request]:
        """From the largest rank down. Only those are ranked that may need as little as the one that is shown."""
        if not (self._memory_counts() and self._has_pool):
            yield from sorted(requests, key=self.rank, reverse=True)
            return
        needs = self._needs_tokens(requests)
        for _ in requests:
            least = min(needs)
            alike = [at for at, need in enumerate(needs) if need == least]
            at = max(alike, key=lambda at: self._most_needed(requests[at]))
            needs[at] = math.inf
            yield requests[at]

    def finished(self, request: Request) -> None:
        """Rank its waiting siblings again if their estimate has changed, and all requests if the spread has."""
        self._by_memory.finished(request)
        if self._spread != self._context.spread:
            self._spread = self._context.spread
            self._by_memory.rank_all()
        if self._by_slots is not None:
            self._by_slots.finished(request)
        if self._limit_binds != self._context.limit_binds:
            self._limit_binds = self._context.limit_binds
            if self._by_slots is not None:
                self._by_slots.rank_all()

    def forget(self, family: int) -> None:
        """No more requests of it come."""
        self._by_memory.forget(family)
        if self._by_slots is not None:
            self._by_slots.forget(family)

    def _memory_counts(self) -> bool:
        return self.memory_is_scarce or not self._has_pool

    def _slots(self) -> EstimatedRank:
        if self._by_slots is None:
            self._by_slots = EstimatedRank(self._context, self._longest_expected)
            self._by_slots.admit(self._by_memory.waiting())
        return self._by_slots

    def _most_needed(self, request: Request) -> Rank:
        expected = self._context.expected_tokens(request.group)
        return (-self._needs_tokens((request,))[0], -expected, request.index, request.id)

    def _needs_tokens(self, requests: Sequence[Request]) -> list[float]:
        """What each request may still need. One plain loop, because all requests of an instance are asked about when
        one of them has to leave.
        """
        context, spread, stretch = self._context, self._spread, 1.0 + OVERRUN
        has_hints, has_turns, longest_of = context.has_length_hints, context.turns.are_known, context.longest_by_family
        needs: list[float] = []
        for request in requests:
            group, num_generated = request.group, request.num_generated
            if has_hints and context.has_length_hint(group):
                need = expected_remaining_tokens(context, request)
            else:
                reach: float = request.max_tokens
                longest = longest_of.get(group.family)
                if longest is not None:  # compared without `min` and `max`: their calls would be half of the loop
                    by_group, by_itself = spread * longest, stretch * num_generated
                    longer = by_group if by_group > by_itself else by_itself
                    reach = longer if longer < reach else reach
                need = reach - num_generated
            needs.append(need + context.turns.remaining_wait_tokens(request) if has_turns else need)
        return needs

    def _longest_expected(self, request: Request) -> Rank:
        need = self.slot_tokens(request) + self._context.turns.remaining_wait_tokens(request)
        if self._limit_binds:
            expected = self._context.expected_tokens(request.group)
            return (-level_of(need, LEVEL_RATIO), -expected, request.index, request.id)
        return rank_by_remaining(request, need, LEVEL_RATIO)

    def _begun_first(self, request: Request) -> Rank:
        return (-request.num_generated, -self._context.expected_tokens(request.group), request.index, request.id)


def expected_remaining_tokens(context: Context, request: Request) -> float:
    """Tokens the request is still expected to need: its group's estimate, raised for a request that has started."""
    expected, num_generated = context.expected_tokens(request.group), request.num_generated
    if not num_generated:
        return float(expected)
    stretched = min(num_generated * (1.0 + OVERRUN), request.max_tokens)
    return float(max(expected, stretched) - num_generated)
