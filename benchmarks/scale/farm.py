# SPDX-License-Identifier: Apache-2.0
"""Many paced instances in one process, each with its own connection to the driver; started by run.py.

    python farm.py < settings, one JSON line; then one JSON line per instance: how it reaches the driver

A paced instance generates no text: every tick it reports some tokens of each request that it runs, and ends a request
at a length that follows from its number. What it sends is what the embedded engine would.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from seer.engine.base import InstanceLimits, InstanceView, OutputSink
from seer.hosting.remote.dial import Dial
from seer.hosting.serving import serve_instance
from seer.metrics.events import EventSink
from seer.types import Chunk, ChunkEnd, ChunkOutput, TokenSpan

LIMITS = InstanceLimits(kv_blocks=20_000, block_size=16, max_num_seqs=98, max_model_len=16_384)


class PacedInstance:
    """Implements what `Server` calls of an instance."""

    def __init__(self, id: int, settings: dict[str, Any], arrived: list[tuple[int, int, float]]) -> None:
        self.id, self.limits = id, LIMITS
        self._tick_s, self._tokens = settings["tick_s"], settings["tokens"]
        self._arrived = arrived
        self._runs: dict[int, list[Any]] = {}  # request -> chunk, tokens done, lease
        self._sink: OutputSink | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, sink: OutputSink) -> None:
        self._sink = sink
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._tick_s * (1 + self.id % 97 / 97), self._tick)

    def submit(self, chunk: Chunk) -> None:
        self._arrived.append((chunk.request, chunk.attempt, time.monotonic()))
        self._runs[chunk.request] = [chunk, 0, chunk.max_tokens]

    def extend(self, leases: Any) -> None:
        for lease in leases:
            if lease.request in self._runs:
                self._runs[lease.request][2] = lease.max_tokens

    def park(self, attempts: Any) -> None:
        for request, attempt in attempts:
            if self._runs.pop(request, None) is not None:
                self._emit(ChunkOutput(request, attempt, self.id, 0, end=ChunkEnd.PARKED))

    def abort(self, request: int) -> None:
        run = self._runs.pop(request, None)
        if run is not None:
            self._emit(ChunkOutput(request, run[0].attempt, self.id, 0, end=ChunkEnd.ABORTED))

    def view(self) -> InstanceView:
        return InstanceView(num_running=len(self._runs), num_steps=int(time.monotonic() * 100))

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        for request, run in list(self._runs.items()):
            chunk, done, lease = run
            length = 40 + request * 7919 % 600
            num = min(self._tokens, lease - done, length - chunk.num_generated_tokens - done)
            if num <= 0:
                continue
            run[1] = done = done + num
            end = None
            if chunk.num_generated_tokens + done >= length:
                end = ChunkEnd.STOP
            elif done == lease:
                end = ChunkEnd.LIMIT
            if end is not None:
                del self._runs[request]
            span = TokenSpan(list(range(1000, 1000 + num)), [-1.25] * num, 0)
            self._emit(ChunkOutput(request, chunk.attempt, self.id, num, span, end, stop_token=7 if end else None))

    def _emit(self, output: ChunkOutput) -> None:
        assert self._sink is not None
        self._sink(output)


async def main() -> tuple[str, dict[str, Any]]:
    settings = json.loads(await asyncio.to_thread(sys.stdin.readline))
    arrived: list[tuple[int, int, float]] = []

    def make(id: int, _: dict[str, Any], events: EventSink) -> Any:
        return PacedInstance(id, settings, arrived)

    serving = []
    while len(serving) < settings["instances"]:
        dial = json.loads(await asyncio.to_thread(sys.stdin.readline))
        dial["secret"] = bytes.fromhex(dial["secret"])
        serving.append(asyncio.create_task(serve_instance(Dial(**dial), make)))
    await asyncio.gather(*serving, return_exceptions=True)
    return settings["out"], {"arrived": arrived, "cpu_s": time.process_time()}


if __name__ == "__main__":
    path, found = asyncio.run(main())
    Path(path).write_text(json.dumps(found))
