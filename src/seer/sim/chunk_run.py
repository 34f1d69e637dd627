# SPDX-License-Identifier: Apache-2.0
"""One chunk on a simulated instance, and the queue of the steps at which chunks are due.

Leases that run low are reported together, so most entries share their step with many others. Entries of one step are
kept in a list that is sorted when its step comes, and only the steps are in a heap: with a thousand chunks, a heap of
all entries would walk through ten levels of scattered memory for each of them.

Invariants
  1. Entries are taken by step, then by request, then in the order they were made.
  2. An entry counts only while its chunk has the version that it was made for; the others are dropped when met.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from seer.types import Chunk, low_lease_tokens


class ChunkRun:
    """One chunk on a simulated instance, from its submission to its end."""

    __slots__ = (
        "began_s",
        "chunk",
        "context",
        "due_step",
        "entered_step",
        "is_last",
        "lease",
        "left",
        "num_loading",
        "prefill",
        "produced",
        "rate",
        "ready_s",
        "report_at",
        "reported",
        "reports",
        "target",
        "version",
    )

    def __init__(self, chunk: Chunk, left: int, began_s: float = 0.0) -> None:
        """`left`: tokens to the response's end, or to that of the present turn."""
        self.chunk = chunk
        self.left = left
        self.began_s = began_s
        self.reported = 0  # tokens in earlier outputs
        self.set_lease(chunk.max_tokens, 0.0)
        self.context: float = chunk.num_context_tokens  # when its rate was last set
        self.produced = 0.0  # of the target, up to then
        self.rate = 1.0
        self.entered_step = 0.0
        self.due_step = 0.0
        self.reports = False  # at that step; otherwise it ends
        self.version = 0  # of its entry in the queue; 0 without one
        self.prefill = 0  # tokens to compute before decoding
        self.num_loading: int | None = None  # tokens whose KV comes over a network; None: all that it lacks
        self.ready_s = 0.0  # when the KV that it loads from the pool has arrived

    def set_lease(self, max_tokens: int, produced: float) -> None:
        """Let it generate `max_tokens` in all; it reports when what it may still generate runs low."""
        self.lease = max_tokens
        self.is_last = self.left <= max_tokens  # the model stops at the target
        self.target = self.left if self.is_last else max_tokens  # tokens this chunk will generate
        remaining = max_tokens - int(produced)
        low = low_lease_tokens(remaining)
        self.report_at = max_tokens - low if self.chunk.is_lease and low < remaining else math.inf


Entry = tuple[int, int, ChunkRun]
"""Request, version, chunk."""


class DueQueue:
    """The chunks of one instance by the step they are due at."""

    def __init__(self) -> None:
        self._steps: list[float] = []  # heap of the keys of `_entries`
        self._entries: dict[float, list[Entry]] = {}

    def push(self, run: ChunkRun) -> None:
        """Enter a chunk at its `due_step`, under its version."""
        entry = run.chunk.request, run.version, run
        entries = self._entries.get(run.due_step)
        if entries is None:
            self._entries[run.due_step] = [entry]
            heapq.heappush(self._steps, run.due_step)
        else:
            entries.append(entry)

    def first_step(self) -> float:
        """The earliest step of an entry that counts; infinite without one."""
        while self._steps:
            entries = self._entries[self._steps[0]]
            while entries:
                _, version, run = entries[-1]
                if run.version == version:
                    return self._steps[0]
                entries.pop()
            del self._entries[heapq.heappop(self._steps)]
        return math.inf

    def pop_first(self) -> list[Entry]:
        """Remove the entries of `first_step`, in order; some may not count any more."""
        entries = self._entries.pop(heapq.heappop(self._steps))
        if len(entries) > 1:
            entries.sort()
        return entries

    def replace(self, runs: Iterable[ChunkRun]) -> None:
        """Hold these and no others."""
        self._entries = {}
        for run in runs:
            self._entries.setdefault(run.due_step, []).append((run.chunk.request, run.version, run))
        self._steps = list(self._entries)
        heapq.heapify(self._steps)
