# SPDX-License-Identifier: Apache-2.0
"""A run as a Chrome trace: open the file in https://ui.perfetto.dev or chrome://tracing.

Each instance is a process, which names its nodes where the events do. Its requests are slices (queued, prefill, decode)
on numbered tracks, because many run at once; a track is reused as soon as its request has left. Running requests and KV
tokens are counter tracks; preemptions are marks. Waits for tools are slices of a process of their own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from seer.machine.whole_files import write_whole
from seer.metrics.events import (
    Answered,
    Asked,
    Decoding,
    Ended,
    Event,
    InstanceState,
    Placed,
    Preempted,
    Prefilling,
    Queued,
    Started,
    Stopped,
)

TOOLS = -1
"""The process of waits for tools."""
_MICROSECONDS = 1e6
"""The trace format counts time in microseconds."""


class _Tracks:
    """Hands out the lowest free track, so that there are no more tracks than requests at once."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, track: int) -> None:
        heapq.heappush(self._free, track)


class _Phase(NamedTuple):
    """What a request does now, on a track of its instance."""

    name: str
    since_s: float
    instance: int
    track: int
    arguments: dict[str, Any]


class PerfettoTrace:
    """An event sink that gathers slices and counters; `write` makes the file."""

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []
        self._group_of: dict[int, int] = {}
        self._tracks: dict[int, _Tracks] = {}
        self._open: dict[int, _Phase] = {}
        """By request."""
        self._nodes_of: dict[int, dict[str, None]] = {}  # by instance, in the order in which it came to them
        self._last_s = 0.0

    def __call__(self, event: Event) -> None:
        """Take one event into account."""
        self._last_s = event.t_s
        if isinstance(event, InstanceState):
            self._count(event)
        elif isinstance(event, Queued):
            self._group_of[event.request] = event.group
        elif isinstance(event, Started):
            self._start(event)
        elif isinstance(event, Prefilling):
            tokens = {
                "tokens": event.num_tokens,
                "recomputed": event.num_recomputed,
                "loaded": event.num_loaded,
            }
            self._enter(event.request, "prefill", event.t_s, tokens)
        elif isinstance(event, Decoding):
            self._enter(event.request, "decode", event.t_s, {})
        elif isinstance(event, Preempted):
            self._mark(event)
            self._enter(event.request, "queued", event.t_s, {"after": "preemption"})
        elif isinstance(event, Stopped):
            self._leave(event)
        elif isinstance(event, Placed):
            self._nodes_of.setdefault(event.instance, {})[event.node] = None
        else:
            self._note_tool(event)

    def write(self, path: Path) -> None:
        """Write everything gathered so far; slices still open end at the last event."""
        names = [
            {
                "ph": "M",
                "pid": instance,
                "name": "process_name",
                "args": {"name": self._name(instance)},
            }
            for instance in sorted(self._tracks)
        ]
        cut = [self._slice(request, self._last_s) for request in self._open]
        encoded = msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": names + self._records + cut})
        write_whole(path, encoded)

    def _name(self, instance: int) -> str:
        if instance == TOOLS:
            return "tools"
        nodes = ", then ".join(self._nodes_of.get(instance, ()))
        return f"instance {instance} on {nodes}" if nodes else f"instance {instance}"

    def _start(self, event: Started) -> None:
        track = self._tracks.setdefault(event.instance, _Tracks()).take()
        arguments = {"limit": event.max_tokens, "moved_from": event.moved_from, "pulls_kv": event.load_kv}
        self._open[event.request] = _Phase("queued", event.t_s, event.instance, track, arguments)

    def _note_tool(self, event: Event) -> None:
        if isinstance(event, Asked):
            track = self._tracks.setdefault(TOOLS, _Tracks()).take()
            self._open[event.request] = _Phase("waits for its tool", event.t_s, TOOLS, track, {"turn": event.turn})
        elif isinstance(event, Answered | Ended) and event.request in self._open:
            self._records.append(self._slice(event.request, event.t_s))
            self._tracks[TOOLS].give_back(self._open.pop(event.request).track)

    def _enter(self, request: int, phase: str, t_s: float, arguments: dict[str, Any]) -> None:
        if request not in self._open:  # its chunk has ended for the loop; the instance has not stopped it yet
            return
        self._records.append(self._slice(request, t_s))
        self._open[request] = self._open[request]._replace(name=phase, since_s=t_s, arguments=arguments)

    def _leave(self, event: Stopped) -> None:
        record = self._slice(event.request, event.t_s)
        record["args"] |= {"generated": event.num_generated, "end": event.reason}
        self._records.append(record)
        phase = self._open.pop(event.request)
        self._tracks[phase.instance].give_back(phase.track)

    def _slice(self, request: int, until_s: float) -> dict[str, Any]:
        phase = self._open[request]
        return {
            "ph": "X",
            "name": phase.name,
            "cat": "request",
            "pid": phase.instance,
            "tid": phase.track,
            "ts": phase.since_s * _MICROSECONDS,
            "dur": (until_s - phase.since_s) * _MICROSECONDS,
            "args": {"request": request, "group": self._group_of.get(request), **phase.arguments},
        }

    def _mark(self, event: Preempted) -> None:
        if event.request in self._open:
            self._records.append(
                {
                    "ph": "i",
                    "s": "t",
                    "name": "preempted",
                    "pid": event.instance,
                    "tid": self._open[event.request].track,
                    "ts": event.t_s * _MICROSECONDS,
                    "args": {"request": event.request},
                }
            )

    def _count(self, event: InstanceState) -> None:
        where = {"ph": "C", "pid": event.instance, "ts": event.t_s * _MICROSECONDS}
        requests = {"running": event.num_running, "waiting": event.num_waiting}
        self._records.append({**where, "name": "requests", "args": requests})
        self._records.append({**where, "name": "KV tokens", "args": {"used": event.kv_tokens}})


def write_trace(events: Iterable[Event], path: Path) -> None:
    """Turn a recorded run into a trace file."""
    trace = PerfettoTrace()
    for event in events:
        trace(event)
    trace.write(path)
