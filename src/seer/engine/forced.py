"""An instance whose responses have lengths given beforehand, for comparisons that lengths must not decide.

Sits between the rollout loop and a real instance. The model's end tokens are ignored, and a response ends,
as if the model had stopped, at its given length. Only the instance side knows the lengths: the loop and its
scheduler see chunks limited by `max_tokens` and responses that stop, exactly as with natural lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from seer.engine.base import Instance, InstanceLimits, InstanceView, OutputSink, Weights
from seer.types import Chunk, ChunkEnd, ChunkOutput


class ForcedLengths:
    """Wraps an instance that has been started; `on_output` must be given its outputs."""

    def __init__(self, instance: Instance, length_of: Callable[[int], int], sink: OutputSink) -> None:
        self._instance = instance
        self._length_of = length_of
        self._sink = sink
        self._ends_here: set[int] = set()

    @property
    def id(self) -> int:
        """The wrapped instance's."""
        return self._instance.id

    @property
    def limits(self) -> InstanceLimits:
        """The wrapped instance's."""
        return self._instance.limits

    async def start(self, sink: OutputSink) -> None:
        """It has been started before."""

    def submit(self, chunk: Chunk) -> None:
        """Pass the chunk on, cut at the response's length."""
        left = self._length_of(chunk.request) - chunk.num_generated_tokens
        assert left >= 1, f"request {chunk.request} has nothing left to generate"
        sampling = replace(chunk.sampling, ignore_eos=True, stop_token_ids=(), min_tokens=0)
        self._instance.submit(msgspec.structs.replace(chunk, sampling=sampling, max_tokens=min(left, chunk.max_tokens)))
        self._ends_here.discard(chunk.request)
        if left <= chunk.max_tokens:
            self._ends_here.add(chunk.request)

    def on_output(self, output: ChunkOutput) -> None:
        """A chunk that reached its response's length has stopped, as far as the loop can tell."""
        if output.end is ChunkEnd.LIMIT and output.request in self._ends_here:
            output = msgspec.structs.replace(output, end=ChunkEnd.STOP)
        self._sink(output)

    def abort(self, request: int) -> None:
        """The wrapped instance's."""
        self._instance.abort(request)

    def view(self) -> InstanceView:
        """The wrapped instance's."""
        return self._instance.view()

    def cached_prefix_tokens(self, chunk: Chunk) -> int:
        """The wrapped instance's."""
        return self._instance.cached_prefix_tokens(chunk)

    async def update_weights(self, weights: Weights, weights_version: int) -> None:
        """The wrapped instance's."""
        await self._instance.update_weights(weights, weights_version)

    async def pause(self) -> None:
        """The wrapped instance's."""
        await self._instance.pause()

    async def resume(self) -> None:
        """The wrapped instance's."""
        await self._instance.resume()

    async def close(self) -> None:
        """Whoever started it closes it."""
