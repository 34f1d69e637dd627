# SPDX-License-Identifier: Apache-2.0
"""Outputs and events on their way to the driver, merged and sent in small batches.

A step makes one token for each running request, and a frame for each token would cost more than the step. So outputs
of a request are merged for at most `flush_s` or `flush_tokens`, whichever comes first. With many requests some have
that many tokens at every step, so frames that end no chunk leave at most every `GATHER_S`. An output that ends a chunk
leaves at once, because the scheduler can use the free slot. A process that dies loses what its outbox holds and what
its socket has not sent.

Invariants
  1. Outputs of one request leave in the order they came, and none is dropped.
  2. Outputs of two attempts or two weights versions are never merged.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from seer.metrics.events import Event
from seer.types import ChunkOutput, TokenSpan

Send = Callable[[list[ChunkOutput], list[Event]], None]

GATHER_S = 0.018
"""Least time between two frames of full outputs: what a frame costs the driver is then shared by the outputs of several
steps. Below what a reader of a stream notices."""


class Outbox:
    """Collects outputs and events, and calls `send` with batches of them."""

    def __init__(self, send: Send, *, flush_s: float, flush_tokens: int) -> None:
        self._send = send
        self._flush_s = flush_s
        self._flush_tokens = flush_tokens
        self._outputs: dict[tuple[int, int], list[ChunkOutput]] = {}
        self._events: list[Event] = []
        self._timer: asyncio.Handle | None = None
        self._due_s = math.inf  # when the timer fires
        self._flushed_s = -math.inf

    def put(self, output: ChunkOutput) -> None:
        """Take an output; it leaves with the next batch."""
        held = self._outputs.setdefault((output.request, output.attempt), [])
        merged = merge(held[-1], output) if held else None
        if merged is None:
            held.append(output)
        else:
            held[-1] = merged
        now_s = asyncio.get_running_loop().time()
        if output.end is not None:
            self._schedule(now_s, now_s)
        elif held[-1].num_tokens >= self._flush_tokens:
            self._schedule(max(now_s, self._flushed_s + GATHER_S), now_s)
        else:
            self._schedule(now_s + self._flush_s, now_s)

    def put_event(self, event: Event) -> None:
        """Take an event; it leaves with the next batch."""
        self._events.append(event)
        now_s = asyncio.get_running_loop().time()
        self._schedule(now_s + self._flush_s, now_s)

    def flush(self) -> None:
        """Send everything that waits, if anything."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due_s = math.inf
        outputs = [output for held in self._outputs.values() for output in held]
        events, self._events = self._events, []
        self._outputs.clear()
        if outputs or events:
            self._flushed_s = asyncio.get_running_loop().time()
            self._send(outputs, events)

    def _schedule(self, due_s: float, now_s: float) -> None:
        """Flush at this time, or earlier if that is planned."""
        if due_s >= self._due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop, self._due_s = asyncio.get_running_loop(), due_s
        # With call_soon, other chunks that end with the same step go into the same frame.
        self._timer = loop.call_at(due_s, self.flush) if due_s > now_s else loop.call_soon(self.flush)


def merge(first: ChunkOutput, second: ChunkOutput) -> ChunkOutput | None:
    """Two successive outputs of one attempt as one, or None if they must stay apart."""
    if first.end is not None or (first.request, first.attempt) != (second.request, second.attempt):
        return None
    span = first.span or second.span
    if first.span is not None and second.span is not None:
        if first.span.weights_version != second.span.weights_version:
            return None
        raw = None
        if first.span.raw_logprobs is not None and second.span.raw_logprobs is not None:
            raw = [*first.span.raw_logprobs, *second.span.raw_logprobs]
        span = TokenSpan(
            [*first.span.ids, *second.span.ids],
            [*first.span.logprobs, *second.span.logprobs],
            first.span.weights_version,
            raw,
        )
    elif first.num_tokens and second.num_tokens and span is not None:
        return None  # one carries tokens, the other only their number
    return ChunkOutput(
        second.request,
        second.attempt,
        second.instance,
        first.num_tokens + second.num_tokens,
        span,
        second.end,
        second.error,
        second.stop_token,
        first.num_drafted + second.num_drafted,
        first.num_accepted + second.num_accepted,
    )
