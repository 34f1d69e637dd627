# SPDX-License-Identifier: Apache-2.0
"""How far responses outgrow the first of their group to finish: learned while responses still run.

A response that runs says something too: it is longer than what it has. So the share of responses beyond a ratio is
estimated as survival is, by a life table: of those that were seen to reach one ratio, how many ended before the next.

Where many responses end at their limit (seer.at_limit), a group's first finish says little of which ones will: any
request may take all that its limit leaves.

One object serves all rollouts of a training run. `begin` keeps what the earlier ones have shown at half its weight: the
next starts with it, and a change of lengths is followed within a few.

Invariants
  1. `value` is one of `SPREADS`, and `FIRST_SPREAD` until responses speak for another one.
  2. A narrower one is taken only for responses that ended. Responses that run can only widen it.
  3. At most `MOST_OPEN` groups are looked at, and only after an eighth more of what is known has ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from seer.at_limit import LimitCount
from seer.request import Request

NARROW_SPREADS, FIRST_SPREAD, WIDE_SPREAD = (3.0, 4.0, 6.0), 8.0, 16.0
SPREADS = (*NARROW_SPREADS, FIRST_SPREAD, WIDE_SPREAD)
"""Values of `Spread.value`: few, because requests are ranked anew when it changes."""
NARROW_SHARE = 0.002
"""At most this share of responses may be longer than a narrow spread: a rollout ends with its longest response."""
WIDE_SHARE = 0.003
"""The widest is taken where more than this share is longer than even that: there the first finish says little. Where
some are longer than `FIRST_SPREAD` and hardly any than the widest, the widest was worse (docs/log.md)."""
RATIOS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)
"""Ends of the life table's rows; the last row has no end."""
LEAST_NEW = 16
"""Responses that end between two looks, at least."""
MOST_OPEN = 512
"""Groups watched at a time: a sample is enough, and bounds the work of a look."""
MOST_KEPT = 4096.0
"""Responses remembered: with more, what is known counts half."""


class LifeTable:
    """Responses by their length over the first of their group: of those that ended, and of those last seen running."""

    def __init__(self) -> None:
        self.ended = [0.0] * (len(RATIOS) + 1)
        self.running = [0.0] * (len(RATIOS) + 1)

    @property
    def num(self) -> float:
        """All of them."""
        return sum(self.ended) + sum(self.running)

    def copy(self) -> LifeTable:
        """Another table with the same numbers."""
        table = LifeTable()
        table.ended, table.running = self.ended.copy(), self.running.copy()
        return table

    def fade(self) -> None:
        """What is known counts half."""
        self.ended = [num / 2 for num in self.ended]
        self.running = [num / 2 for num in self.running]

    def add_group(self, first: Request, members: Sequence[Request]) -> None:
        """All but the first to finish, ended or not; cancelled ones are longer than what they have."""
        for member in members:
            if member is first:
                continue
            row = bisect_left(RATIOS, member.num_generated / max(1, first.num_generated))
            is_whole = member.finish_reason is not None and member.finish_reason.is_complete
            (self.ended if is_whole else self.running)[row] += 1

    def seen_beyond(self, ratio: float) -> float:
        """Share that is longer than this already: never more than will be."""
        row = RATIOS.index(ratio) + 1
        return (sum(self.ended[row:]) + sum(self.running[row:])) / max(1.0, self.num)

    def share_beyond(self, ratio: float) -> float:
        """Share that will be longer than this, rather too many: each row has half a response more that lives on."""
        share, at_risk = 1.0, self.num
        for end, ended, running in zip(RATIOS, self.ended, self.running, strict=False):
            share *= 1.0 - ended / (at_risk - running / 2 + 0.5)
            at_risk -= ended + running
            if end == ratio:
                break
        return share


class Spread:
    """The spread of one training run, over all its rollouts."""

    def __init__(self) -> None:
        self.value = FIRST_SPREAD
        self.known = LifeTable()
        """Of groups that are no longer watched."""
        self._open: dict[int, tuple[Request, Sequence[Request]]] = {}  # family -> its first to finish, all its members
        self._num_open = 0  # members of the open groups
        self._num_new = 0  # ended since the last look
        self._limits = LimitCount()

    @property
    def limit_binds(self) -> bool:
        """Whether many responses end at their limit."""
        return self._limits.binds

    @property
    def num_watched(self) -> int:
        """Groups of which one request has ended and another has not."""
        return len(self._open)

    def begin(self) -> None:
        """Another rollout begins: what the earlier ones have shown counts half."""
        for family in list(self._open):
            self.close(family)
        self.known.fade()
        self._limits.fade()
        self._look()

    def observe(self, request: Request, members: Sequence[Request]) -> None:
        """A request has ended by itself. `members`: all requests of its group."""
        self._limits.observe(request)
        family = request.group.family
        if family not in self._open and not self._opened(request, members):
            return
        self._num_new += 1
        if all(member.ended for member in members):
            self.close(family)
        if self._num_new >= max(LEAST_NEW, (self.known.num + self._num_open) / 8):
            self._look()

    def close(self, family: int) -> None:
        """The family is not watched any longer; what it has shown is kept."""
        found = self._open.pop(family, None)
        if found is None:
            return
        first, members = found
        self._num_open -= len(members)
        self.known.add_group(first, members)
        if self.known.num > MOST_KEPT:
            self.known.fade()

    def _opened(self, request: Request, members: Sequence[Request]) -> bool:
        """Whether the group is watched from now on: only from its first finish on can it be."""
        is_first = sum(member.ended for member in members) == 1 and request.group.first_index == 0
        if len(members) < 2 or not is_first or len(self._open) >= MOST_OPEN:
            return False
        self._open[request.group.family] = request, members
        self._num_open += len(members)
        return True

    def _look(self) -> None:
        self._num_new = 0
        table = self.known.copy()
        for first, members in self._open.values():
            table.add_group(first, members)
        self.value = chosen_spread(table)


def chosen_spread(table: LifeTable) -> float:
    """The widest where responses were seen beyond it; else the narrowest that leaves out hardly any."""
    if table.seen_beyond(WIDE_SPREAD) > WIDE_SHARE:
        return WIDE_SPREAD
    enough = (spread for spread in NARROW_SPREADS if table.share_beyond(spread) <= NARROW_SHARE)
    return next(enough, FIRST_SPREAD)
