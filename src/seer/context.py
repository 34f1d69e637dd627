# SPDX-License-Identifier: Apache-2.0
"""What the groups have shown so far in this iteration: how long their responses are.

The paper's estimate, exactly. Until a request of the group has finished, the group counts as long as it may become
(`max_tokens`), so that an unknown long group is not left to the end. From the first finish on, the estimate is the
longest finished response. A length hint (the group's estimate in an earlier epoch) replaces `max_tokens` where there is
one.

`spread` says how far an estimate may be off: how many times as long as the first of its group to finish a response may
be, as this iteration and those before it have shown; `limit_binds`, whether many end at their limit (seer.spread).

`turns` is what conversations have shown: turns, tokens of a turn, and how long tools take (seer.turn_estimates).

`service` counts the tokens granted to a group, for the guard against starvation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seer.buffer import Request
from seer.spread import Spread
from seer.turn_estimates import TurnEstimates
from seer.types import Group


class Context:
    """Length estimate and service of each group, or of each family of groups."""

    def __init__(self, length_hints: Mapping[str, int] | None = None, spread: Spread | None = None) -> None:
        self._length_hints = length_hints or {}
        """Longest response of a prompt in an earlier epoch, by `Group.key`."""
        self._longest_finished: dict[int, int] = {}
        self._spread = Spread() if spread is None else spread
        self._spread.begin()
        self.turns = TurnEstimates()
        self._service: dict[int, int] = {}

    def expected_tokens(self, group: Group) -> int:
        """The paper's estimate of how long the group's responses are."""
        longest = self._longest_finished.get(group.family)
        if longest is not None:
            return longest
        hint = self._length_hint(group) if self._length_hints else None
        return group.sampling.max_tokens if hint is None else min(hint, group.sampling.max_tokens)

    def has_length_hint(self, group: Group) -> bool:
        """Whether an earlier epoch has shown how long the group's responses are."""
        return bool(self._length_hints) and self._length_hint(group) is not None

    @property
    def has_length_hints(self) -> bool:
        """Whether there is a hint for any group."""
        return bool(self._length_hints)

    @property
    def longest_by_family(self) -> Mapping[int, int]:
        """The longest finished response of each family that has one, in this iteration."""
        return self._longest_finished

    def knows(self, group: Group) -> bool:
        """Whether a request of the group has finished in this iteration."""
        return group.family in self._longest_finished

    @property
    def spread(self) -> float:
        """How many times as long as the first of its group to finish a response may be."""
        return self._spread.value

    @property
    def limit_binds(self) -> bool:
        """Whether many responses end at their limit, so that any may."""
        return self._spread.limit_binds

    def observe_finished(self, request: Request, members: Sequence[Request] = ()) -> None:
        """Learn the length of a request that ended by itself; cancelled and failed requests say nothing of lengths.

        `members` are all requests of its group: those that still run tell how far they have come.
        """
        group = request.group.family
        self._longest_finished[group] = max(self._longest_finished.get(group, 0), request.num_generated)
        if request.turns:
            self.turns.observe_finished(request)
        self._spread.observe(request, members)

    def grant(self, request: Request, num_tokens: int) -> None:
        """The request was given a chunk of this many tokens."""
        group = request.group.family
        self._service[group] = self._service.get(group, 0) + num_tokens

    def service_tokens(self, group: Group) -> int:
        """Tokens granted to the group so far."""
        return self._service.get(group.family, 0)

    def forget(self, family: int) -> None:
        """No more requests of it come."""
        self._longest_finished.pop(family, None)
        self._spread.close(family)
        self.turns.forget(family)
        self._service.pop(family, None)

    def as_length_hints(self, groups: Mapping[int, Group]) -> dict[str, int]:
        """Length hints for the same prompts in a later epoch."""
        return {
            key: longest for group, longest in self._longest_finished.items() if (key := groups[group].key) is not None
        }

    def _length_hint(self, group: Group) -> int | None:
        return self._length_hints.get(group.key) if group.key is not None else None
