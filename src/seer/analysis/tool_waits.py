# SPDX-License-Identifier: Apache-2.0
"""When requests waited for their environments: from each `Asked` to the `Answered` or `Ended` that follows it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from seer.metrics.events import Answered, Asked, Ended, Event, Stopped
from seer.sim.turns import RequestTurns
from seer.types import FinishReason


class ToolWait(NamedTuple):
    """One call of an environment."""

    request: int
    turn: int
    """Turns that the model had ended, from 1."""
    from_s: float
    to_s: float
    end: str
    """`answered`, or the finish reason of the response that it ended."""
    num_tokens: int
    """That it gave."""

    @property
    def has_failed(self) -> bool:
        """Whether the response failed for it."""
        return self.end == FinishReason.FAILED.value


def tool_waits(events: Sequence[Event], first_s: float = 0.0) -> list[ToolWait]:
    """All waits that ended, in the order of their ends, in seconds since `first_s`."""
    asked: dict[int, Asked] = {}
    waits: list[ToolWait] = []
    for event in events:
        if isinstance(event, Asked):
            asked[event.request] = event
        elif isinstance(event, Answered | Ended) and event.request in asked:
            since = asked.pop(event.request)
            end = "answered" if isinstance(event, Answered) else event.finish_reason
            num_tokens = event.num_tokens if isinstance(event, Answered) else 0
            waits.append(ToolWait(event.request, since.turn, since.t_s - first_s, event.t_s - first_s, end, num_tokens))
    return waits


def recorded_turns(events: Sequence[Event]) -> dict[int, RequestTurns]:
    """By request: where its turns ended, what tools gave after them, and how long that took. Empty without turns."""
    num_generated: dict[int, int] = {}
    ends: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, Stopped):
            num_generated[event.request] = event.num_generated
        elif isinstance(event, Asked):
            ends.setdefault(event.request, []).append(num_generated.get(event.request, 0))
    waits: dict[int, list[ToolWait]] = {}
    for wait in tool_waits(events):
        waits.setdefault(wait.request, []).append(wait)
    return {
        request: RequestTurns(
            tuple(ends[request]),
            tuple(wait.num_tokens for wait in mine[:-1]),
            tuple(wait.to_s - wait.from_s for wait in mine),
        )
        for request, mine in waits.items()
    }


def most_at_once(waits: Sequence[ToolWait]) -> int:
    """The most requests that waited for their environments at one time."""
    most = now = 0
    for _, change in sorted([(one.from_s, 1) for one in waits] + [(one.to_s, -1) for one in waits]):
        now += change
        most = max(most, now)
    return most


def total_s(waits: Sequence[ToolWait]) -> float:
    """Seconds waited, summed over requests."""
    return sum(one.to_s - one.from_s for one in waits)


def median_s(waits: Sequence[ToolWait]) -> float:
    """How long a call took; 0 without one."""
    return statistics.median(one.to_s - one.from_s for one in waits) if waits else 0.0
