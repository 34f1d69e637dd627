# SPDX-License-Identifier: Apache-2.0
"""When requests waited for their environments: from each `Asked` to the `Answered` or `Ended` that follows it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from seer.metrics.events import Answered, Asked, Ended, Event


class ToolWait(NamedTuple):
    """One call of an environment."""

    request: int
    from_s: float
    to_s: float


def tool_waits(events: Sequence[Event]) -> list[ToolWait]:
    """All waits that ended, in the order of their ends."""
    since_s: dict[int, float] = {}
    waits: list[ToolWait] = []
    for event in events:
        if isinstance(event, Asked):
            since_s[event.request] = event.t_s
        elif isinstance(event, Answered | Ended) and event.request in since_s:
            waits.append(ToolWait(event.request, since_s.pop(event.request), event.t_s))
    return waits


def most_at_once(waits: Sequence[ToolWait]) -> int:
    """The most requests that waited for their environments at one time."""
    most = now = 0
    for _, change in sorted([(one.from_s, 1) for one in waits] + [(one.to_s, -1) for one in waits]):
        now += change
        most = max(most, now)
    return most


def median_s(waits: Sequence[ToolWait]) -> float:
    """How long a call took; 0 without one."""
    return statistics.median(one.to_s - one.from_s for one in waits) if waits else 0.0
