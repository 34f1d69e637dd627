# SPDX-License-Identifier: Apache-2.0
"""Who ran where in the last minutes, and how much longer it may take: what the live page draws.

Invariants
  1. At most `MAX_SPANS` chunks that have ended are kept; those that run are kept until they stop.
  2. A span that is sent again has the same id, so a page can replace it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from seer.metrics.events import Answered, Asked, Ended, Event, Queued, Started, Stopped
from seer.metrics.live_counts import LiveCounts

MAX_SPANS = 4000
"""More bars than a screen has rows of pixels for."""
TOOLS = -1
"""In place of an instance: the request waits for its tool, and holds none."""


@dataclass(slots=True)
class Span:
    """One chunk on an instance, or one wait for a tool."""

    id: int
    instance: int
    request: int
    group: int
    index: int
    start_s: float
    end_s: float | None = None
    reason: str | None = None

    def as_row(self) -> list[int | float | str | None]:
        """For JSON."""
        return [self.id, self.instance, self.group, self.index, self.start_s, self.end_s, self.reason]


@dataclass(slots=True)
class _Lengths:
    """What a group with open requests has shown so far."""

    num_open: int = 0
    longest: int = 0


class LiveTimeline:
    """An event sink beside `LiveCounts`, which must get each event first."""

    def __init__(self, counts: LiveCounts) -> None:
        self._counts = counts
        self._running: dict[int, Span] = {}
        self._ended: deque[Span] = deque(maxlen=MAX_SPANS)
        self._groups: dict[int, _Lengths] = {}
        self._group_of: dict[int, int] = {}
        self._num_spans = 0

    def __call__(self, event: Event) -> None:
        """Take one event into account."""
        if isinstance(event, Queued):
            self._groups.setdefault(event.group, _Lengths()).num_open += 1
            self._group_of[event.request] = event.group
        elif isinstance(event, Started | Asked):
            self._start(event)
        elif isinstance(event, Stopped):
            self._stop(event.request, event.t_s, event.reason)
        elif isinstance(event, Answered):
            self._stop(event.request, event.t_s, "answered")
        elif isinstance(event, Ended):
            self._stop(event.request, event.t_s, event.finish_reason)
            self._end(event)

    def spans(self, since: int = -1) -> list[Span]:
        """Those that run, and those that ended and are newer than span `since`; oldest first."""
        return [*(span for span in self._ended if span.id > since), *self._running.values()]

    @property
    def newest(self) -> int:
        """The id before which nothing that ended will change; what runs is always sent again."""
        return min((span.id for span in self._running.values()), default=self._num_spans) - 1

    def tokens_left(self) -> tuple[int, int] | None:
        """Tokens that open requests may still generate: of all together, and of the longest; None if nothing is known.

        A request is expected to reach the longest response of its group so far, or without one the mean of all.
        """
        ended = self._counts.response_tokens
        num_ended = sum(ended.counts)
        if not num_ended:
            return None
        mean = round(ended.total / num_ended)
        left = [
            max(1, (self._groups[request.group].longest or mean) - request.num_generated)
            for request in self._counts.open.values()
            if request.group in self._groups
        ]
        return sum(left), max(left, default=0)

    def _start(self, event: Started | Asked) -> None:
        request = self._counts.open.get(event.request)
        if request is None:
            return
        instance = event.instance if isinstance(event, Started) else TOOLS
        span = Span(self._num_spans, instance, event.request, request.group, request.index, event.t_s)
        self._num_spans += 1
        self._running[event.request] = span

    def _stop(self, request: int, t_s: float, reason: str) -> None:
        span = self._running.pop(request, None)
        if span is not None:
            span.end_s, span.reason = t_s, reason
            self._ended.append(span)

    def _end(self, event: Ended) -> None:
        group = self._group_of.pop(event.request, None)
        lengths = self._groups.get(group) if group is not None else None
        if group is None or lengths is None:
            return
        lengths.longest = max(lengths.longest, event.num_generated)
        lengths.num_open -= 1
        if not lengths.num_open:
            del self._groups[group]
