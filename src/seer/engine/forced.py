# SPDX-License-Identifier: Apache-2.0
"""An instance whose responses have given lengths, to compare schedulers on equal lengths.

Wraps another instance. The model's end tokens are ignored, and a response stops at its given length. The rollout
loop and its scheduler do not see the lengths: they see chunks limited by `max_tokens` and responses that stop, as
with natural lengths.

Invariants
  1. A response has exactly its given length, however it is cut into chunks, and its last chunk ends with STOP.
  2. A chunk that ends before the given length keeps the end of the wrapped instance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from seer.engine.base import Instance, OutputSink
from seer.engine.instance_wrapper import InstanceWrapper
from seer.types import Attempt, Chunk, ChunkEnd, ChunkOutput, Lease


class ForcedLengths(InstanceWrapper[Instance]):
    """Implements `seer.engine.base.Instance` over an instance whose responses may have any length.

    For an instance that is not started yet, `start` starts it. For one that runs already, call `attach` instead,
    and pass its outputs to `on_output`.
    """

    def __init__(self, instance: Instance, length_of: Callable[[int], int]) -> None:
        super().__init__(instance)
        self._length_of = length_of
        self._sink: OutputSink | None = None
        self._left: dict[Attempt, int] = {}  # of attempts that run: tokens to the response's length
        self._stops_at_limit: set[Attempt] = set()  # those whose lease reaches the length

    async def start(self, sink: OutputSink) -> None:
        """Start the wrapped instance."""
        self.attach(sink)
        await self.inner.start(self.on_output)

    def attach(self, sink: OutputSink) -> None:
        """Send outputs to `sink` from now on."""
        self._sink = sink

    def submit(self, chunk: Chunk) -> None:
        """Pass the chunk on, cut at the response's length."""
        left = self._length_of(chunk.request) - chunk.num_generated_tokens
        assert left >= 1, f"request {chunk.request} has nothing left to generate"
        sampling = replace(chunk.sampling, ignore_eos=True, stop_token_ids=(), stop=(), min_tokens=0)
        self.inner.submit(msgspec.structs.replace(chunk, sampling=sampling, max_tokens=min(left, chunk.max_tokens)))
        attempt = Attempt(chunk.request, chunk.attempt)
        self._left[attempt] = left
        if left <= chunk.max_tokens:
            self._stops_at_limit.add(attempt)

    def extend(self, leases: Sequence[Lease]) -> None:
        """Pass the leases on, cut at the responses' lengths."""
        self.inner.extend([self._cut(lease) for lease in leases if (lease.request, lease.attempt) in self._left])

    def _cut(self, lease: Lease) -> Lease:
        attempt = Attempt(lease.request, lease.attempt)
        left = self._left[attempt]
        if left <= lease.max_tokens:
            self._stops_at_limit.add(attempt)
        return Lease(*attempt, min(left, lease.max_tokens))

    def on_output(self, output: ChunkOutput) -> None:
        """Take an output of the wrapped instance; a chunk that reached the response's length has stopped."""
        assert self._sink is not None, "outputs come after start or attach"
        attempt = Attempt(output.request, output.attempt)
        if output.end is not None:
            self._left.pop(attempt, None)
            if attempt in self._stops_at_limit:
                self._stops_at_limit.remove(attempt)
                if output.end is ChunkEnd.LIMIT:
                    output = msgspec.structs.replace(output, end=ChunkEnd.STOP)
        self._sink(output)
