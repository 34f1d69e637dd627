# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM engines that share a pool, for tests that move requests between them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from engines import a_chunk
from inbox import OutputInbox
from seer.types import ChunkOutput, Sampling, TokenSpan
from vllm_engines import START_DEADLINE_S, LoopThread, SharedEngine

BLOCK_SIZE = 32
CHUNK_TOKENS = 32
RESPONSE_TOKENS = 160
GROUP = list(range(3, 43))
"""The prompt: longer than a block, so that its KV moves too."""


class Pair:
    """Two instances over two engines, and the outputs of both. `settings` are of the engines, `options` of moving."""

    def __init__(
        self,
        folder: Path,
        pool: dict[str, Any],
        thread: LoopThread,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from seer.config import TransferOptions, VllmSpeculation

        self.folder, self.pool, self.thread = folder, pool, thread
        self.load_async = options.get("load_async", False)
        # However busy the machine is, blocks on their way to the pool are waited for.
        options |= {"near_deadline_s": 5.0}
        self.num_ranks = (settings or {}).get("tensor_parallel", 1)
        settings = (settings or {}) | {
            "pool": pool,
            "pool_options": TransferOptions(**options),
            "speculation": VllmSpeculation(fixed_tokens=4),
        }
        self.engines = [SharedEngine(folder, thread, **settings) for _ in range(2)]
        self.inbox = OutputInbox()
        self.instances = [engine.instance(i) for i, engine in enumerate(self.engines)]
        self._next = 0

    async def start(self) -> None:
        if self.num_ranks > 1:  # one after the other, so that each has the machine's cores
            for instance in self.instances:
                await instance.start(self.inbox)
        else:
            await asyncio.gather(*(instance.start(self.inbox) for instance in self.instances))

    async def close(self) -> None:
        await asyncio.gather(*(instance.close() for instance in self.instances))
        await asyncio.gather(*(asyncio.to_thread(engine.close) for engine in self.engines))

    async def begin(self, drafts: str) -> None:
        """A run of its own, that finds nothing in the engines' own memory."""
        for engine, instance in zip(self.engines, self.instances, strict=True):
            await instance.begin_run(uuid.uuid4().hex, drafts, 0)
            assert await engine.forget()

    def request(self) -> int:
        self._next += 1
        return self._next

    async def chunk(self, instance: int, request: int, spans: tuple[TokenSpan, ...], **chunk: Any) -> list[ChunkOutput]:
        attempt = 1 + max((o.attempt for o in self.inbox.outputs if o.request == request), default=0)
        sampling = {"temperature": 0.0, "ignore_eos": True} | chunk.pop("sampling", {})
        prompt = chunk.pop("prompt", None) or [*GROUP, 60 + chunk.pop("variant", 0)]
        asked = a_chunk(request, prompt, spans=spans, **chunk)
        sampling = Sampling(max_tokens=RESPONSE_TOKENS, **sampling)
        self.instances[instance].submit(msgspec.structs.replace(asked, attempt=attempt, sampling=sampling))

        def of() -> list[ChunkOutput]:
            return [o for o in self.inbox.outputs if (o.request, o.attempt) == (request, attempt)]

        await self.inbox.until(lambda: any(o.end for o in of()))
        return of()

    async def whole(self, variant: int = 0) -> list[TokenSpan]:
        outputs = await self.chunk(0, self.request(), (), max_tokens=RESPONSE_TOKENS, load_kv=False, variant=variant)
        return [o.span for o in outputs if o.span]

    async def moving(self, variant: int) -> list[TokenSpan]:
        """One request, each chunk on the other instance."""
        spans: tuple[TokenSpan, ...] = ()
        request, at = self.request(), variant
        while sum(len(span.ids) for span in spans) < RESPONSE_TOKENS:
            outputs = await self.chunk(at % 2, request, spans, max_tokens=CHUNK_TOKENS, variant=variant)
            spans += tuple(o.span for o in outputs if o.span)
            at += 1
        return list(spans)

    async def counts(self, name: str) -> float:
        return sum([float((await instance.pool_counts()).get(name, 0)) for instance in self.instances])


def running(pair: Pair) -> Iterator[Pair]:
    pair.thread.run(pair.start(), pair.num_ranks * START_DEADLINE_S)
    yield pair
    pair.thread.run(pair.close())


def ids(spans: list[TokenSpan]) -> list[int]:
    return [token for span in spans for token in span.ids]


def raw(spans: list[TokenSpan]) -> list[float]:
    return [value for span in spans for value in span.raw_logprobs or ()]
