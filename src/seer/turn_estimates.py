# SPDX-License-Identifier: Apache-2.0
"""What finished conversations of a group have shown: how many turns they have, how long a turn and a tool's answer are.

A request with turns is not only as long as its tokens. While its tool works it generates nothing, and its siblings and
others use its place. So the time that its tools will still take counts for what remains of it, as the tokens that a
request generates in that time (`remaining_wait_tokens`).

Pure: times come with the turns, no clock is read. A group teaches from its first finished request on, and its estimate
changes only when one of its requests finishes.
"""

from __future__ import annotations

from typing import NamedTuple

from seer.request import Request
from seer.types import Group


class TurnEstimate(NamedTuple):
    """The conversations of one group."""

    num_turns: int
    """Most turns of a finished one."""
    turn_tokens: float
    """Mean tokens that the model generates in a turn."""
    tool_s: float
    """Mean time of a tool's answer."""
    token_s: float
    """Mean time of a generated token."""

    @property
    def wait_tokens(self) -> float:
        """Tokens that a request generates while a tool works."""
        return self.tool_s / self.token_s if self.token_s > 0 else 0.0


class _Seen:
    """Sums over the finished requests of one group."""

    __slots__ = ("generated_s", "most_turns", "num_answers", "num_timed_tokens", "num_tokens", "num_turns", "tool_s")

    def __init__(self) -> None:
        self.most_turns = self.num_turns = self.num_tokens = self.num_timed_tokens = self.num_answers = 0
        self.generated_s = self.tool_s = 0.0

    def add(self, request: Request) -> None:
        self.most_turns = max(self.most_turns, request.num_turns)
        for turn in request.turns:
            seconds = turn.ended_s - turn.began_s if turn.began_s is not None and turn.ended_s is not None else None
            if turn.kind == "generated":
                self.num_turns += 1
                self.num_tokens += turn.end - turn.start
                if seconds is not None:  # those of an interrupted run have no times
                    self.num_timed_tokens += turn.end - turn.start
                    self.generated_s += seconds
            elif seconds is not None:
                self.num_answers += 1
                self.tool_s += seconds

    def estimate(self) -> TurnEstimate:
        return TurnEstimate(
            self.most_turns,
            self.num_tokens / max(1, self.num_turns),
            self.tool_s / max(1, self.num_answers),
            self.generated_s / max(1, self.num_timed_tokens),
        )


class TurnEstimates:
    """The estimate of each family of groups with turns."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._estimates: dict[int, TurnEstimate] = {}

    def observe_finished(self, request: Request) -> None:
        """Learn from a conversation that ended by itself."""
        family = request.group.family
        seen = self._seen.setdefault(family, _Seen())
        seen.add(request)
        self._estimates[family] = seen.estimate()

    @property
    def are_known(self) -> bool:
        """Whether any group has shown turns."""
        return bool(self._estimates)

    def of(self, group: Group) -> TurnEstimate | None:
        """What the group has shown; None before its first finish, and without turns."""
        return self._estimates.get(group.family)

    def forget(self, family: int) -> None:
        """No more requests of it come."""
        self._seen.pop(family, None)
        self._estimates.pop(family, None)

    def remaining_wait_tokens(self, request: Request) -> float:
        """Tokens that the request could generate in the time that its tools are still expected to take."""
        estimate = self._estimates.get(request.group.family)
        if estimate is None:
            return 0.0
        return max(0, estimate.num_turns - request.num_turns) * estimate.wait_tokens
