# SPDX-License-Identifier: Apache-2.0
"""Server actors of verl without Ray, verl or vLLM: what the driver calls on them, around instances without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from seer.engine.fake import FakeInstance
from seer.hosting.remote.dial import Dial
from seer.hosting.serving import serve_instance
from seer.types import Chunk, ChunkOutput, DraftMode


class ActorDied(Exception):
    """What every call to a dead actor raises."""


class Method:
    """`actor.method.remote(...)`; calls in flight fail when the actor dies."""

    def __init__(self, actor: StandInServer, function: Callable[..., Awaitable[Any]]) -> None:
        self._actor, self._function = actor, function

    def remote(self, *args: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._call(*args))

    async def _call(self, *args: Any) -> Any:
        if self._actor.died.is_set():
            raise ActorDied("the actor is dead")
        work = asyncio.ensure_future(self._function(*args))
        death = asyncio.ensure_future(self._actor.died.wait())
        await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if not work.done():
            work.cancel()
            raise ActorDied("the actor died")
        return work.result()


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning of both."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class DraftingFake(FakeInstance):
    """A `FakeInstance` that is told of runs and groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runs: list[tuple[str, int]] = []
        self.ended: list[int] = []
        self.has_work = asyncio.Event()
        self.computed: list[tuple[int, ...]] = []
        """Context that it had to compute for each chunk: what follows the longest prefix that it knows."""
        self._known: list[list[int]] = []
        self._context_of: dict[int, list[int]] = {}

    def submit(self, chunk: Chunk) -> None:
        super().submit(chunk)
        context = list(chunk.token_ids())
        longest = max((_num_common(context, known) for known in self._known), default=0)
        self.computed.append(tuple(context[longest:]))
        self._context_of[chunk.request] = context
        self._known.append(context)
        self.has_work.set()

    def _emit(self, output: ChunkOutput) -> None:
        if output.span is not None:
            self._context_of[output.request].extend(output.span.ids)
        super()._emit(output)

    async def begin_run(
        self, run: str, drafts: DraftMode, weights_version: int, past: Mapping[int, Sequence[Sequence[int]]]
    ) -> None:
        self.runs.append((drafts, weights_version))

    def end_group(self, group: int) -> None:
        self.ended.append(group)


class StandInServer:
    """The part of `SeerHttpServer` that the driver uses; it serves over a real connection."""

    def __init__(self, rank: int, **settings: Any) -> None:
        self.instance = DraftingFake(rank, **settings)
        self.died = asyncio.Event()
        self.num_questions = 0
        self.has_work = self.instance.has_work
        self.seer_serve = Method(self, self._serve)
        self.seer_weights_version = Method(self, self._weights_version)
        self._serving: asyncio.Task[None] | None = None

    async def sync(self, weights_version: int) -> None:
        """verl's weight sync."""
        await self.instance.update_weights({}, weights_version)

    def kill(self) -> None:
        self.died.set()
        if self._serving is not None:
            self._serving.cancel()

    async def _serve(self, dial: Dial) -> None:
        self._serving = asyncio.create_task(serve_instance(dial, lambda id, settings, events: self.instance))

    async def _weights_version(self) -> int:
        self.num_questions += 1
        return self.instance.view().weights_version
