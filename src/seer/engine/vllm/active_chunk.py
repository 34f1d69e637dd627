# SPDX-License-Identifier: Apache-2.0
"""One chunk on its way through vLLM's engine: what was asked of it, and what each of vLLM's outputs means for it.

Knows neither the engine nor the event loop: instance.py sends and receives.

Invariants
  1. Every token that vLLM sends is reported once, up to the end of a stop string and none after it.
  2. vLLM names neither stop strings nor parks as a reason: a string ends the chunk here, and a parked chunk that ends
     before its lease is used up was parked.
  3. A stop token that ends the chunk is named, also where it completes a stop string.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from seer.engine.stop_strings import StopStrings
from seer.engine.vllm.chunks import chunk_end, token_span
from seer.types import Chunk, ChunkEnd, ChunkOutput, TokenSpan

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


@dataclass(slots=True)
class ActiveChunk:
    """A chunk that was accepted and has not ended."""

    chunk: Chunk
    name: str
    """Its request id in vLLM."""
    max_tokens: int
    """Its lease."""
    task: asyncio.Task[None] | None = None
    num_reported: int = 0
    is_parked: bool = False
    is_aborted: bool = False
    is_begun: bool = False
    is_stopped: bool = False
    """Whether a stop string has ended it: what vLLM still sends is dropped."""
    _stops: StopStrings | None = None
    _turn: list[int] = field(default_factory=list)
    """Tokens of the present turn, where stop strings are looked for."""

    @classmethod
    def of(cls, chunk: Chunk, model_dir: Path) -> ActiveChunk:
        """A chunk for an engine of this model."""
        active = cls(chunk, f"{chunk.request}.{chunk.attempt}", chunk.max_tokens)
        if chunk.sampling.stop:
            from seer.engine.local.tokenizer import decoder

            active._stops = StopStrings(decoder(model_dir), chunk.sampling.stop)
            active._turn = chunk.token_ids()[chunk.num_prompt_tokens + chunk.num_given_tokens + chunk.turn_start :]
        return active

    def take(self, output: CompletionOutput, *, instance: int, vocab_size: int) -> ChunkOutput | None:
        """What one of vLLM's outputs says, as this instance reports it; None if that is nothing."""
        chunk = self.chunk
        span = token_span(chunk, self.num_reported, output, vocab_size)
        end, stop, error = chunk_end(output)
        if self._stops is not None and span is not None:
            whole, span = span, self._until_stop(self._stops, span)
            if self.is_stopped:
                end, error = ChunkEnd.STOP, None
                stop = stop if len(span.ids) == len(whole.ids) else None  # it came after the string
        num_tokens = len(span.ids) if span is not None else 0
        self.num_reported += num_tokens
        if end is ChunkEnd.LIMIT and self.is_parked and self.num_reported < self.max_tokens:
            end = ChunkEnd.PARKED
        if end is None and not num_tokens:
            return None
        return ChunkOutput(chunk.request, chunk.attempt, instance, num_tokens, span, end, error=error, stop_token=stop)

    def _until_stop(self, stops: StopStrings, span: TokenSpan) -> TokenSpan:
        """The tokens up to the end of a stop string, if they complete one."""
        self._turn.extend(span.ids)
        num_before = self.chunk.num_generated_tokens + self.num_reported
        num_free = max(0, self.chunk.sampling.min_tokens - num_before)
        until = stops.find(self._turn, len(span.ids), num_free)
        if until is None:
            return span
        self.is_stopped = True
        raw = span.raw_logprobs[:until] if span.raw_logprobs is not None else None
        return TokenSpan(span.ids[:until], span.logprobs[:until], span.weights_version, raw)
