# SPDX-License-Identifier: Apache-2.0
"""The turns of simulated conversations: where a response is cut, what its tool gives, and how long that takes.

A request waits for its tool after each turn, the last one included. Three ways to treat its KV while it waits:

    park        it rests in the pool; the request holds nothing on its instance
    recompute   there is no pool: it is computed again, unless it still rests on the instance
    hold        it stays on the instance: a request keeps its place from its start to its end, so only as many are
                admitted as have room there at their mean length

Invariant: turns are a function of lengths, model and seed. So all ways and schedulers have the same turns, given tokens
and tool times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from seer.ranges import Count, CountOrZero, SecondsOrZero

WhileWaiting = Literal["park", "recompute", "hold"]
WAYS: tuple[WhileWaiting, ...] = get_args(WhileWaiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Numbers whose logarithm is normal, cut at both ends."""

    median: float
    sigma: float
    """Standard deviation of the logarithm; 0: all equal."""
    least: float
    most: float

    def draw(self, dice: random.Random) -> float:
        """One number."""
        drawn = self.median * math.exp(dice.gauss(0.0, self.sigma)) if self.sigma else self.median
        return min(max(drawn, self.least), self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnModel:
    """How responses talk to their tools."""

    tool_s: LogNormal
    given_tokens: LogNormal
    """Of one answer."""
    most_turns: int = 12
    """Turns are drawn evenly from 2 to this, where they were not recorded."""


@dataclass(frozen=True, slots=True)
class RequestTurns:
    """The turns of one request."""

    ends: tuple[Count, ...]
    """Tokens it has generated at the end of each turn."""
    given: tuple[CountOrZero, ...]
    """Tokens that the tool gives after each turn but the last."""
    tool_s: tuple[SecondsOrZero, ...]
    """What each call takes."""

    @property
    def num_generated(self) -> int:
        """Tokens of the whole response that the model generates."""
        return self.ends[-1] if self.ends else 0

    @property
    def is_whole(self) -> bool:
        """Whether each turn has tokens and the time of a call, and each but the last an answer."""
        num_turns = len(self.ends)
        have_tokens = all(before < end for before, end in pairwise((0, *self.ends)))
        return have_tokens and len(self.given) == num_turns - 1 and len(self.tool_s) == num_turns

    def end_after(self, num_generated: int) -> int:
        """The end of the turn in which this many tokens are the start or the middle."""
        return next(end for end in self.ends if end > num_generated)


def plan_turns(
    lengths: Sequence[Sequence[int]], model: TurnModel, seed: int, counts: Sequence[Sequence[int]] | None = None
) -> tuple[RequestTurns, ...]:
    """Turns of every request, group after group; `counts` are their numbers of turns, where these are known."""
    dice = random.Random(seed)
    flat = [length for row in lengths for length in row]
    known = [count for row in counts for count in row] if counts is not None else None
    fewest = min(2, model.most_turns)
    return tuple(
        _split(length, known[i] if known is not None else dice.randint(fewest, model.most_turns), model, dice)
        for i, length in enumerate(flat)
    )


def _split(length: int, wanted: int, model: TurnModel, dice: random.Random) -> RequestTurns:
    count = min(length, wanted)
    ends = (*sorted(dice.sample(range(1, length), count - 1)), length)
    given = tuple(round(model.given_tokens.draw(dice)) for _ in range(count - 1))
    return RequestTurns(ends, given, tuple(round(model.tool_s.draw(dice), 3) for _ in range(count)))
