# SPDX-License-Identifier: Apache-2.0
"""One chunk on a simulated instance, and the queue of the steps at which chunks are due.

Leases that run low are reported together, so most chunks share their step with many others. Those of one step are kept
together and sorted when it comes, and only the steps are in a heap: with a thousand chunks, a heap of them would walk
through ten levels of scattered memory for each.

Invariants
  1. Chunks are taken by step, then by request.
  2. A chunk in the queue is there once, at its `due_step`; that of any other is infinite.
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
        self.due_step = math.inf  # set by the queue
        self.reports = False  # at that step; otherwise it ends
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


class DueQueue:
    """The chunks of one instance by the step they are due at."""

    def __init__(self) -> None:
        self._steps: list[float] = []  # heap of the keys of `_runs`
        self._runs: dict[float, dict[int, ChunkRun]] = {}  # step -> request -> chunk

    def put(self, run: ChunkRun, step: float) -> None:
        """The chunk is due at this step, and no longer at another one."""
        self.remove(run)
        run.due_step = step
        runs = self._runs.get(step)
        if runs is None:
            self._runs[step] = {run.chunk.request: run}
            heapq.heappush(self._steps, step)
        else:
            runs[run.chunk.request] = run

    def remove(self, run: ChunkRun) -> None:
        """The chunk is not due; ignored if it is not in the queue."""
        if run.due_step < math.inf:
            del self._runs[run.due_step][run.chunk.request]
            run.due_step = math.inf

    def first_step(self) -> float:
        """The earliest step at which one is due; infinite if none is."""
        steps, runs = self._steps, self._runs
        while steps:
            if runs[steps[0]]:
                return steps[0]
            del runs[heapq.heappop(steps)]
        return math.inf

    def at(self, step: float) -> list[ChunkRun]:
        """Those that are due at this step, in order."""
        runs = self._runs[step]
        return [runs[request] for request in sorted(runs)]

    def replace(self, runs: Iterable[ChunkRun]) -> None:
        """Hold these, each at the `due_step` that it has been given, and no others."""
        self._runs = {}
        for run in runs:
            self._runs.setdefault(run.due_step, {})[run.chunk.request] = run
        self._steps = list(self._runs)
        heapq.heapify(self._steps)
