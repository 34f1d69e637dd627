# SPDX-License-Identifier: Apache-2.0
"""An instance without a model: tokens are a pure function of the request's seed and the token's position.

For tests that need no weights, in Seer and in code that uses Seer. As with the local engine, chunking, moving or
restarting a request changes none of its tokens.

The length of a response is a function of its seed too, between 1 and `max_tokens`, unless end tokens are ignored. With
turns, this holds for each turn: its length is a function of the seed and of where it begins. Stop tokens end it before
that, and stop strings where the instance can decode.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from seer.config import FakeEngineConfig
from seer.engine.admission import refuse_new_weights
from seer.engine.base import InstanceLimits, InstanceView, OutputSink, Weights
from seer.engine.instance_settings import read_settings
from seer.engine.stop_strings import Decode, StopStrings
from seer.errors import InstanceError
from seer.metrics.events import EventSink, discard
from seer.types import Attempt, Chunk, ChunkEnd, ChunkOutput, Lease, TokenSpan

KV_BLOCKS, MAX_MODEL_LEN = 1024, 8192
VOCABULARY = 1000
"""Token ids are below this; large enough that two responses rarely agree by chance."""
END_TOKEN = 0
"""Ends a response; no other position has it."""
_MASK = 0xFFFFFFFFFFFFFFFF
"""Keeps the hash within 64 bits."""


def fake_token(seed: int, position: int, vocabulary: int = VOCABULARY) -> int:
    """The token at a position of a response, never the end token."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + 1) & _MASK
    x = ((x ^ (x >> 31)) * 0x94D049BB133111EB) & _MASK
    return 1 + (x >> 33) % (vocabulary - 1)


def fake_length(seed: int, max_tokens: int) -> int:
    """The length of a seed's response, its end token included: many are short, few are long."""
    x = fake_token(seed, -1, 1 << 30) / (1 << 30)
    return max(1, min(max_tokens, math.ceil(max_tokens * x**3)))


def fake_stop(seed: int, max_tokens: int, turn_start: int = 0) -> int:
    """Generated tokens at the end of a turn, its end token included, where its first token is number `turn_start`."""
    return turn_start + fake_length(seed + turn_start, max_tokens - turn_start)


@dataclass(slots=True)
class _Run:
    chunk: Chunk
    max_tokens: int
    """Its lease."""
    stop: int
    """Generated tokens at the end of the turn."""
    done: int = 0
    stops: StopStrings | None = None
    turn: list[int] = field(default_factory=list)
    """Tokens of the present turn, where stop strings are looked for."""

    def is_stopped_by(self, token: int) -> bool:
        """Whether the next token ends the turn: it is a stop token, or completes a stop string."""
        sampling, num_before = self.chunk.sampling, self.chunk.num_generated_tokens + self.done
        if self.stops is not None:
            self.turn.append(token)
        if num_before < sampling.min_tokens:
            return False
        if token in sampling.stop_token_ids:
            return True
        return self.stops is not None and self.stops.find(self.turn, 1) is not None


class FakeInstance:
    """Implements `seer.engine.base.Instance`: one token per running request and step."""

    def __init__(
        self,
        id: int,
        *,
        kv_blocks: int = KV_BLOCKS,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_model_len: int = MAX_MODEL_LEN,
        step_s: float = 0.0,
        events: EventSink = discard,
        decode: Decode | None = None,
    ) -> None:
        self._id = id
        self._decode = decode
        self._limits = InstanceLimits(
            kv_blocks=kv_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self._step_s = step_s
        self._sink: OutputSink | None = None
        self._runs: dict[int, _Run] = {}  # by request
        self._cached: dict[int, int] = {}
        self._weights_version = 0
        self._num_steps = 0
        self._timer: asyncio.Handle | None = None
        self._is_paused = False

    @property
    def id(self) -> int:
        """Dense and unique within a rollout."""
        return self._id

    @property
    def limits(self) -> InstanceLimits:
        """What it can hold."""
        return self._limits

    async def start(self, sink: OutputSink) -> None:
        """Ready at once."""
        self._sink = sink

    def submit(self, chunk: Chunk) -> None:
        """Start a chunk."""
        if chunk.num_context_tokens + chunk.max_tokens > self._limits.max_model_len:
            raise InstanceError(f"request {chunk.request} may reach more than {self._limits.max_model_len} tokens")
        if chunk.weights_version != self._weights_version:
            raise InstanceError(
                f"chunk of weights version {chunk.weights_version}, instance {self._id} has {self._weights_version}"
            )
        if chunk.request in self._runs:
            raise InstanceError(f"request {chunk.request} already runs on instance {self._id}")
        stop = max(fake_stop(chunk.seed, chunk.sampling.max_tokens, chunk.turn_start), chunk.sampling.min_tokens)
        self._runs[chunk.request] = run = _Run(chunk, chunk.max_tokens, stop)
        if chunk.sampling.stop and self._decode is not None:
            run.stops = StopStrings(self._decode, chunk.sampling.stop)
            run.turn = chunk.token_ids()[chunk.num_prompt_tokens + chunk.num_given_tokens + chunk.turn_start :]
        self._step_soon()

    def extend(self, leases: Sequence[Lease]) -> None:
        """Let running chunks generate more."""
        for lease in leases:
            run = self._running(lease.request, lease.attempt)
            if run is not None:
                run.max_tokens = max(run.max_tokens, lease.max_tokens)

    def park(self, attempts: Sequence[Attempt]) -> None:
        """End running chunks with what they have."""
        for request, attempt in attempts:
            if self._running(request, attempt) is not None:
                del self._runs[request]
                self._emit(ChunkOutput(request, attempt, self._id, 0, end=ChunkEnd.PARKED))

    def _running(self, request: int, attempt: int) -> _Run | None:
        run = self._runs.get(request)
        return run if run is not None and run.chunk.attempt == attempt else None

    def abort(self, request: int) -> None:
        """End a request's chunk."""
        run = self._runs.pop(request, None)
        if run is not None:
            self._emit(ChunkOutput(request, run.chunk.attempt, self._id, 0, end=ChunkEnd.ABORTED))

    def view(self) -> InstanceView:
        """Counts as of now."""
        running = min(len(self._runs), self._limits.max_num_seqs)
        used = sum(self._limits.blocks(run.chunk.num_context_tokens + run.done) for run in self._runs.values())
        return InstanceView(
            num_running=running,
            num_waiting=len(self._runs) - running,
            used_kv_blocks=used,
            num_steps=self._num_steps,
            weights_version=self._weights_version,
        )

    def cached_prefix_tokens(self, chunk: Chunk) -> int:
        """What it has computed of the request."""
        return min(self._cached.get(chunk.request, 0), chunk.num_context_tokens)

    async def update_weights(self, weights: Weights, weights_version: int) -> None:
        """There are no weights; only the version changes."""
        refuse_new_weights(
            weights_version, instance=self._id, newest=self._weights_version, num_in_flight=len(self._runs)
        )
        self._weights_version = weights_version
        self._cached.clear()

    async def pause(self) -> None:
        """Stop stepping."""
        self._is_paused = True

    async def resume(self) -> None:
        """Step again."""
        self._is_paused = False
        self._step_soon()

    async def close(self) -> None:
        """Abort every chunk."""
        for request in list(self._runs):
            self.abort(request)
        if self._timer is not None:
            self._timer.cancel()

    def _step_soon(self) -> None:
        if self._timer is None and self._runs and not self._is_paused:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._step_s, self._step) if self._step_s else loop.call_soon(self._step)

    def _step(self) -> None:
        self._timer = None
        if self._is_paused:
            return
        self._num_steps += 1
        for request in list(self._runs)[: self._limits.max_num_seqs]:
            self._generate(request)
        self._step_soon()

    def _generate(self, request: int) -> None:
        run = self._runs[request]
        chunk = run.chunk
        is_end = not chunk.sampling.ignore_eos and chunk.num_generated_tokens + run.done + 1 == run.stop
        position = chunk.num_generated_tokens + chunk.num_given_tokens + run.done
        token = END_TOKEN if is_end else fake_token(chunk.seed, position)
        is_end = run.is_stopped_by(token) or is_end
        run.done += 1
        end = ChunkEnd.STOP if is_end else (ChunkEnd.LIMIT if run.done == run.max_tokens else None)
        self._cached[request] = chunk.num_context_tokens + run.done
        if end is not None:
            del self._runs[request]
        logprobs = [-1.0 - token / VOCABULARY] if chunk.sampling.logprobs else []
        span = TokenSpan([token], logprobs, self._weights_version)
        stop_token = token if token in (END_TOKEN, *chunk.sampling.stop_token_ids) else None
        self._emit(ChunkOutput(request, chunk.attempt, self._id, 1, span, end, stop_token=stop_token))

    def _emit(self, output: ChunkOutput) -> None:
        assert self._sink is not None, "output before start"
        self._sink(output)


def make_fake(id: int, settings: dict[str, Any], events: EventSink) -> FakeInstance:
    """For `InstanceSpec.factory`; `settings` are those of `InstanceSettings`, as plain values."""
    given = read_settings(settings)
    config = given.config
    return FakeInstance(
        id,
        kv_blocks=config.kv.blocks or KV_BLOCKS,
        block_size=config.kv.block_size,
        max_num_seqs=given.max_num_seqs,
        max_model_len=config.max_model_len or MAX_MODEL_LEN,
        step_s=given.engine_settings(FakeEngineConfig).step_s,
        events=events,
    )
