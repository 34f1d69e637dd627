# SPDX-License-Identifier: Apache-2.0
"""What the report page needs of a run, read from its folder: chunks, states, ends, and time by cause.

Times are seconds since the first request was queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from seer.analysis.explain import Explanation, explain
from seer.analysis.leases import LeaseReport, report_leases
from seer.analysis.tool_waits import ToolWait, tool_waits
from seer.errors import InputError
from seer.metrics.events import (
    Decoding,
    Dropped,
    Ended,
    Event,
    InstanceState,
    Placed,
    PoolErrors,
    PoolUsed,
    Prefilling,
    Queued,
    Started,
    Stepped,
    Stopped,
)
from seer.metrics.run_events import count_instances, read_run_events
from seer.metrics.summary import tail_start_s
from seer.runs.manifest import Limits, Manifest
from seer.runs.run_folder import RunFolder


@dataclass(slots=True)
class ChunkBar:
    """One chunk on one instance."""

    request: int
    instance: int
    from_s: float
    to_s: float
    track: int
    decoding_s: float | None = None
    """When it began to generate, where the instance reported it."""
    end: str = "running"
    num_generated: int = 0
    migrated_from: int | None = None
    """The instance of its request's last chunk, if that was another one."""


@dataclass(slots=True)
class RunData:
    """A run as the charts need it."""

    title: str
    manifest: Manifest
    num_instances: int
    """All that took part, those that joined later too."""
    limits: list[Limits]
    """Of each instance."""
    makespan_s: float = 0.0
    tail_from_s: float = 0.0
    chunks: list[ChunkBar] = field(default_factory=list)
    states: list[list[InstanceState]] = field(default_factory=list)
    steps: list[list[Stepped]] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    group_of: dict[int, int] = field(default_factory=dict)
    index_of: dict[int, int] = field(default_factory=dict)
    ended: dict[int, tuple[float, int, str]] = field(default_factory=dict)
    """request -> when, tokens, finish_reason"""
    explanation: Explanation | None = None
    leases: LeaseReport | None = None
    """None where no lease was extended: the scheduler has chunks of a fixed size."""
    num_loaded_tokens: int = 0
    """Whose KV came from the pool."""
    num_recomputed_tokens: int = 0
    """Whose KV had been computed before."""
    node_of: dict[int, str] = field(default_factory=dict)
    """Of each instance; empty where all were on the driver's machine."""
    pool_errors: list[PoolErrors] = field(default_factory=list)
    pool_used: list[PoolUsed] = field(default_factory=list)
    tool_waits: list[ToolWait] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    """Groups that were whole and not kept."""

    def kv_tokens(self, instance: int) -> int:
        """Tokens whose KV the instance can hold."""
        return self.limits[instance].kv_blocks * self.limits[instance].block_size

    @property
    def mean_kv_tokens(self) -> int:
        """Per instance, so that unlike instances make the right sum."""
        return sum(map(self.kv_tokens, range(self.num_instances))) // self.num_instances


def read_run(folder: RunFolder) -> RunData:
    """Read a run from its folder."""
    manifest = folder.read_facts()
    if manifest.limits is None:
        raise InputError(f"{folder.path} ended before its instances had started", hint="there is nothing to report")
    events = read_run_events(folder.events, manifest.options.instances, allow_cut=True)
    num_instances = count_instances(events, manifest.options.instances)
    data = RunData(
        title=manifest.options.scheduler,
        manifest=manifest,
        num_instances=num_instances,
        limits=manifest.limits_of_all(num_instances),
    )
    data.states = [[] for _ in range(data.num_instances)]
    data.steps = [[] for _ in range(data.num_instances)]
    first_s = min((event.t_s for event in events if isinstance(event, Queued)), default=None)
    if first_s is None:
        raise InputError(f"{folder.events} holds no request", hint="there is nothing to report")
    _gather(data, events, first_s)
    data.tool_waits = tool_waits(events, first_s)
    data.explanation = explain(events, max_num_seqs=[one.max_num_seqs for one in data.limits])
    leases = report_leases(events, kv_tokens=data.mean_kv_tokens)
    data.leases = leases if leases.num_extended else None
    if data.ends_s:
        data.makespan_s = max(data.ends_s)
        data.tail_from_s = tail_start_s(sorted(data.ends_s))
    return data


def _gather(data: RunData, events: Sequence[Event], first_s: float) -> None:
    bars = _ChunkBars(data.num_instances)
    for event in events:
        t_s = event.t_s - first_s
        if isinstance(event, Started | Decoding | Stopped):
            bars.add(event, t_s)
        elif isinstance(event, Queued):
            data.group_of[event.request], data.index_of[event.request] = event.group, event.index
        elif isinstance(event, Ended):
            data.ends_s.append(t_s)
            data.ended[event.request] = (t_s, event.num_generated, event.finish_reason)
        elif isinstance(event, InstanceState):
            data.states[event.instance].append(event)
        elif isinstance(event, Stepped):
            data.steps[event.instance].append(event)
        elif isinstance(event, Prefilling):
            data.num_loaded_tokens += event.num_loaded
            data.num_recomputed_tokens += event.num_recomputed
        elif isinstance(event, Placed):
            data.node_of[event.instance] = event.node
        elif isinstance(event, PoolErrors):
            data.pool_errors.append(event)
        elif isinstance(event, PoolUsed):
            data.pool_used.append(event)
        elif isinstance(event, Dropped):
            data.dropped.append(event)
    data.states = [[_shifted(one, first_s) for one in states] for states in data.states]
    data.steps = [[_shifted(one, first_s) for one in steps] for steps in data.steps]
    bars.end_open(max((event.t_s for event in events), default=first_s) - first_s)
    data.chunks = bars.all


class _ChunkBars:
    """The bars of the timeline. Each chunk takes the lowest track of its instance that no running chunk has."""

    def __init__(self, num_instances: int) -> None:
        self.all: list[ChunkBar] = []
        self._open: dict[int, ChunkBar] = {}
        self._busy_tracks: list[set[int]] = [set() for _ in range(num_instances)]

    def add(self, event: Started | Decoding | Stopped, t_s: float) -> None:
        """Begin, mark or end a bar."""
        if isinstance(event, Started):
            tracks = self._busy_tracks[event.instance]
            track = next(track for track in range(len(tracks) + 1) if track not in tracks)
            tracks.add(track)
            bar = ChunkBar(event.request, event.instance, t_s, t_s, track, migrated_from=event.migrated_from)
            self._open[event.request] = bar
            self.all.append(bar)
        elif isinstance(event, Stopped):
            bar = self._open.pop(event.request)
            bar.to_s, bar.end, bar.num_generated = t_s, event.reason, event.num_generated
            self._busy_tracks[bar.instance].discard(bar.track)
        elif event.request in self._open:
            bar = self._open[event.request]
            if bar.instance == event.instance and bar.decoding_s is None:
                bar.decoding_s = max(bar.from_s, t_s)

    def end_open(self, last_s: float) -> None:
        """End the bars of chunks that never stopped."""
        for bar in self._open.values():
            bar.to_s = last_s


def _shifted(event: Any, first_s: float) -> Any:
    return msgspec.structs.replace(event, t_s=event.t_s - first_s)
