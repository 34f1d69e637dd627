# SPDX-License-Identifier: Apache-2.0
"""The event log of a run's folder, checked: what reports and replays take for granted holds for every line.

Invariants
  1. Every instance is one of the run's. A run may gain instances: their ids follow the others without a gap, and each
     tells of its own state. Counts and times are not negative, counts fit 64 bits, times three centuries.
  2. A request is queued once and ends at most once, with no fewer tokens than it was queued with. Its chunks start and
     stop in turn, between the two; only a chunk that runs is extended.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from seer.errors import InputError
from seer.metrics.events import Ended, Event, Extended, InstanceState, Queued, Started, Stepped, Stopped
from seer.metrics.jsonl import read_events
from seer.ranges import INT64_MAX
from seer.types import FinishReason

_MAX_FLOAT = 1e10
"""Most numbers with a fraction are seconds."""
_REASONS = {reason.value for reason in FinishReason}


def read_run_events(path: Path, num_instances: int, *, allow_cut: bool = False) -> list[Event]:
    """The events of a run that began with so many instances; `allow_cut` leaves a last line out that a kill cut off."""
    rules = _Rules()
    events = []
    first_line: dict[int, int] = {}  # that names an instance
    for number, event in enumerate(read_events(path, allow_cut=allow_cut), 2):
        try:
            rules.check(event)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}", hint="the file is damaged") from None
        for instance in _instances_in(event):
            first_line.setdefault(instance, number)
        events.append(event)
    known = count_instances(events, num_instances)
    for instance, number in first_line.items():
        if instance >= known:
            raise InputError(f"{path}, line {number}: instance {instance} of {known}", hint="the file is damaged")
    return events


def count_instances(events: Iterable[Event], num_instances: int) -> int:
    """Instances of a run that began with so many and may have gained others."""
    speaking = {event.instance for event in events if isinstance(event, InstanceState | Stepped)}
    while num_instances in speaking:
        num_instances += 1
    return num_instances


def _instances_in(event: Event) -> list[int]:
    named = (getattr(event, "instance", None), getattr(event, "moved_from", None))
    return [instance for instance in named if instance is not None]


class _Rules:
    """The rules over the events so far; a ValueError names the one that is broken."""

    def __init__(self) -> None:
        self._is_running: dict[int, bool] = {}
        """By request, from its `Queued` to its `Ended`."""
        self._ended: set[int] = set()
        self._earlier_tokens: dict[int, int] = {}
        """That a request was queued with, by request; absent for none."""

    def check(self, event: Event) -> None:
        """Take one event into account."""
        self._check_numbers(event)
        if isinstance(event, Queued):
            is_new = event.request not in self._is_running and event.request not in self._ended
            _require(is_new, event, "was queued before")
            self._is_running[event.request] = False
            if event.num_generated:
                self._earlier_tokens[event.request] = event.num_generated
        elif isinstance(event, Extended):
            _require(self._is_running.get(event.request, False), event, "is extended and does not run")
        elif isinstance(event, Started | Stopped | Ended):
            self._check_turn(event)

    def _check_turn(self, event: Started | Stopped | Ended) -> None:
        _require(event.request in self._is_running, event, "is not there, or had ended")
        is_running = self._is_running[event.request]
        if isinstance(event, Ended):
            if event.finish_reason not in _REASONS:
                raise ValueError(f"finish_reason {event.finish_reason!r}: one of {', '.join(sorted(_REASONS))}")
            is_whole = event.num_generated >= self._earlier_tokens.pop(event.request, 0)
            _require(is_whole, event, "ends with fewer tokens than it was queued with")
            del self._is_running[event.request]
            self._ended.add(event.request)
            return
        _require(is_running != isinstance(event, Started), event, "starts twice, or stops without a start")
        self._is_running[event.request] = isinstance(event, Started)

    def _check_numbers(self, event: Event) -> None:
        for name in event.__struct_fields__:
            value = getattr(event, name)
            if isinstance(value, int) and not 0 <= value <= INT64_MAX:
                raise ValueError(f"{name}={value if abs(value) < 1 << 70 else 'a huge number'}: 0 to {INT64_MAX:,}")
            if isinstance(value, float) and not 0 <= value <= _MAX_FLOAT:  # NaN is not
                raise ValueError(f"{name}={value}: 0 to {_MAX_FLOAT:g}")


def _require(holds: bool, event: Queued | Started | Extended | Stopped | Ended, what: str) -> None:
    if not holds:
        raise ValueError(f"request {event.request} {what}")
