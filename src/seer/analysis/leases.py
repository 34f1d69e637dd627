# SPDX-License-Identifier: Apache-2.0
"""What leases cost and gained in a run, from its events.

An extension that arrives in time costs its request nothing: it goes on decoding. One that arrives after the lease has
ended costs the time until the request decodes again. That is the extension's gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seer.metrics.events import (
    Answered,
    Asked,
    Decoding,
    Ended,
    Event,
    Extended,
    InstanceState,
    Queued,
    Started,
    Stopped,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReport:
    """Leases of one run."""

    num_chunks: int
    num_extended: int
    num_parked: int
    num_late: int
    """Chunks that ended although their lease had been extended."""
    p99_gap_s: float
    """Of all extensions, late or not."""
    kv_use: float | None
    """Share of the KV memory in use while any request waited, mean over time; None if none did."""


def report_leases(events: Sequence[Event], *, kv_tokens: int) -> LeaseReport:
    """Read a run's events; `kv_tokens` is the KV memory of each instance."""
    gaps = _gaps(events)
    num_extended = sum(isinstance(event, Extended) for event in events)
    every = sorted([*gaps, *([0.0] * max(0, num_extended - len(gaps)))])
    return LeaseReport(
        num_chunks=sum(isinstance(event, Started) for event in events),
        num_extended=num_extended,
        num_parked=sum(isinstance(event, Stopped) and event.reason == "parked" for event in events),
        num_late=len(gaps),
        p99_gap_s=every[min(len(every) - 1, int(0.99 * len(every)))] if every else 0.0,
        kv_use=_kv_use(events, kv_tokens),
    )


def _gaps(events: Sequence[Event]) -> list[float]:
    """Seconds from the end of each chunk that should have gone on until its request decodes again."""
    lease_end: dict[int, int] = {}  # request -> tokens that it may have generated when its lease ends
    num_generated: dict[int, int] = {}
    stopped_s: dict[int, float] = {}
    gaps: list[float] = []
    for event in events:
        if isinstance(event, Queued):
            num_generated[event.request] = event.num_generated
        elif isinstance(event, Started):
            lease_end[event.request] = num_generated.get(event.request, 0) + event.max_tokens
        elif isinstance(event, Extended):
            lease_end[event.request] += event.num_tokens
        elif isinstance(event, Stopped):
            num_generated[event.request] = event.num_generated
            if event.reason == "limit" and event.num_generated < lease_end[event.request]:
                stopped_s[event.request] = event.t_s
        elif isinstance(event, Decoding) and event.request in stopped_s:
            gaps.append(event.t_s - stopped_s.pop(event.request))
    return gaps


def _kv_use(events: Sequence[Event], kv_tokens: int) -> float | None:
    """Mean of the share in use over instances and time, while any request waits."""
    num_waiting = 0
    at_tool: set[int] = set()
    used: dict[int, int] = {}
    since_s = total = seconds = 0.0
    for event in sorted(events, key=lambda event: event.t_s):
        if num_waiting and used:
            passed_s = event.t_s - since_s
            total += passed_s * sum(used.values()) / (len(used) * kv_tokens)
            seconds += passed_s
        since_s = event.t_s
        num_waiting += _waiting_change(event, at_tool)
        if isinstance(event, InstanceState):
            used[event.instance] = event.kv_tokens
    return total / seconds if seconds else None


def _waiting_change(event: Event, at_tool: set[int]) -> int:
    """A request waits from its admission, its chunk's end or its tool's answer until a chunk starts, or it ends."""
    if isinstance(event, Asked):
        at_tool.add(event.request)
        return -1  # its chunk's end came just before
    if isinstance(event, Answered | Ended) and event.request in at_tool:
        at_tool.remove(event.request)
        return int(isinstance(event, Answered))
    if isinstance(event, Queued | Stopped):
        return 1
    return -1 if isinstance(event, Started | Ended) else 0
