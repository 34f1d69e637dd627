# SPDX-License-Identifier: Apache-2.0
"""An instance without a model that answers as vLLM does at a given rate: for driver.py.

Every step has one token for each running request. Tokens of a request are reported `STREAM_TOKENS` at a time, each with
two log-probabilities, and steps a few times a second. The work per token is small, so that many tokens a second take
little of a core here, and what is measured is the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from seer.engine.base import InstanceLimits, InstanceView, OutputSink, Weights
from seer.engine.fake import fake_stop
from seer.engine.step_events import StepTally
from seer.metrics.events import Decoding, EventSink, Prefilling
from seer.speculation.step_report import StepReport
from seer.types import Attempt, Chunk, ChunkEnd, ChunkOutput, Lease, TokenSpan

STREAM_TOKENS = 16
_IDS = list(range(100_000, 100_000 + 4096))
_LOGPROBS = [-0.001 * (i % 977) for i in range(4096)]


@dataclass(slots=True)
class _Run:
    chunk: Chunk
    max_tokens: int
    stop: int
    done: int = 0
    reported: int = 0


class PacedInstance:
    """Implements `seer.engine.base.Instance`."""

    def __init__(self, id: int, limits: InstanceLimits, step_s: float, events: EventSink) -> None:
        self._id, self._limits, self._step_s, self._events = id, limits, step_s, events
        self._sink: OutputSink | None = None
        self._runs: dict[int, _Run] = {}
        self._tally = StepTally(id)
        self._num_steps = 0
        self._next_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    id = property(lambda self: self._id)
    limits = property(lambda self: self._limits)
    vocab_size = property(lambda self: 1 << 18)
    failure = property(lambda self: None)

    async def start(self, sink: OutputSink) -> None:
        """Ready at once."""
        self._sink = sink

    def submit(self, chunk: Chunk) -> None:
        """Start a chunk."""
        stop = fake_stop(chunk.seed, chunk.sampling.max_tokens) - chunk.num_generated_tokens
        self._runs[chunk.request] = _Run(chunk, chunk.max_tokens, stop)
        if self._timer is None:
            self._next_s = self._now_s()
            self._plan()

    def extend(self, leases: Sequence[Lease]) -> None:
        """Let running chunks generate more."""
        for lease in leases:
            run = self._runs.get(lease.request)
            if run is not None and run.chunk.attempt == lease.attempt:
                run.max_tokens = max(run.max_tokens, lease.max_tokens)

    def park(self, attempts: Sequence[Attempt]) -> None:
        """End running chunks with what they have."""
        for request, attempt in attempts:
            run = self._runs.get(request)
            if run is not None and run.chunk.attempt == attempt:
                self._report(run, ChunkEnd.PARKED)

    def abort(self, request: int) -> None:
        """End a request's chunk."""
        if request in self._runs:
            self._report(self._runs[request], ChunkEnd.ABORTED)

    def view(self) -> InstanceView:
        """Counts as of now."""
        used = sum(self._limits.blocks(run.chunk.num_context_tokens + run.done) for run in self._runs.values())
        return InstanceView(num_running=len(self._runs), used_kv_blocks=used, num_steps=self._num_steps)

    def cached_prefix_tokens(self, chunk: Chunk) -> int:
        """Nothing is kept."""
        return 0

    async def update_weights(self, weights: Weights, weights_version: int) -> None:
        """There are no weights."""

    async def pause(self) -> None:
        """Does nothing."""

    async def resume(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """End every chunk."""
        for request in list(self._runs):
            self.abort(request)
        if self._timer is not None:
            self._timer.cancel()

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        self._next_s = max(self._next_s + self._step_s, loop.time() - 0.1)  # late steps are made up for
        self._timer = loop.call_at(self._next_s, self._step) if self._runs else None

    def _step(self) -> None:
        self._num_steps += 1
        running = list(self._runs.values())
        for run in running:
            run.done += 1
            if run.done == run.stop:
                self._report(run, ChunkEnd.STOP)
            elif run.done == run.max_tokens:
                self._report(run, ChunkEnd.LIMIT)
            elif run.done - run.reported == STREAM_TOKENS or run.done == 1:
                self._report(run, None)
        count = len(running)
        self._tally.add(StepReport(self._step_s, 1, count, count, 0, 0, count, 0, 0))
        if self._tally.is_due(now_s := self._now_s()):
            for event in self._tally.take(now_s):
                self._events(event)
        self._plan()

    def _report(self, run: _Run, end: ChunkEnd | None) -> None:
        chunk, first, last = run.chunk, run.reported, run.done
        if first == 0:
            now_s = self._now_s()
            self._events(Prefilling(now_s, chunk.request, self._id, 1, 0, 0))
            self._events(Decoding(now_s, chunk.request, self._id))
        if end is not None:
            del self._runs[chunk.request]
        run.reported = last
        values = _LOGPROBS[first:last]
        span = TokenSpan(_IDS[first:last], values, chunk.weights_version, values) if last > first else None
        assert self._sink is not None, "output before start"
        self._sink(ChunkOutput(chunk.request, chunk.attempt, self._id, last - first, span, end))

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def make_paced(id: int, settings: dict[str, Any], events: EventSink) -> PacedInstance:
    """For `InstanceSpec.factory`."""
    config = settings["config"]
    limits = InstanceLimits(
        kv_blocks=config["kv"]["blocks"],
        block_size=config["kv"]["block_size"],
        max_num_seqs=config["max_num_seqs"],
        max_model_len=config["max_model_len"],
    )
    return PacedInstance(id, limits, config["engine_settings"]["step_s"], events)
