# SPDX-License-Identifier: Apache-2.0
"""Faults for a `seer serve` process while clients stream from it: `HTTP_STRIKES`, by name."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from faults import children_of
from serve_process import ServeProcess
from strikes import send

BAD_BODIES = (
    b"",
    b"{",
    b'{"prompt": []}',
    b'{"prompt": [1], "n": -1}',
    b'{"prompt": [1], "max_tokens": 1e400}',
    b"\xff" * 9,
)


@dataclass
class Served:
    """A server, the folder of its instances' logs, and a client."""

    server: ServeProcess
    logs: Path
    client: httpx.AsyncClient

    def instances(self) -> list[int]:
        return sorted(set(children_of(self.logs)) - {self.server.process.pid})


HttpStrike = Callable[[Served, random.Random], Awaitable[None]]


async def kill_an_instance(served: Served, rng: random.Random) -> None:
    send(signal.SIGKILL, *served.instances()[:1])


async def kill_all_instances(served: Served, rng: random.Random) -> None:
    send(signal.SIGKILL, *served.instances())


async def _stop_for(seconds: float, pids: list[int]) -> None:
    send(signal.SIGSTOP, *pids)
    try:
        await asyncio.sleep(seconds)
    finally:
        send(signal.SIGCONT, *pids)


async def stop_and_resume_an_instance(served: Served, rng: random.Random) -> None:
    await _stop_for(rng.uniform(0.1, 3.0), served.instances()[-1:])


async def stop_and_resume_the_server(served: Served, rng: random.Random) -> None:
    await _stop_for(rng.uniform(0.1, 3.0), [served.server.process.pid])


async def leave(served: Served, rng: random.Random) -> None:
    """Clients that begin to read and go away."""
    body = {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 2}
    for _ in range(3):
        with contextlib.suppress(httpx.HTTPError, StopAsyncIteration):
            async with served.client.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_bytes())


async def send_rubbish(served: Served, rng: random.Random) -> None:
    for content in rng.choices([*BAD_BODIES, rng.randbytes(100)], k=5):
        reply = await served.client.post("/v1/completions", content=content)
        assert reply.status_code == 400, reply.text


async def stall(served: Served, rng: random.Random) -> None:
    """Connections that send half a request and nothing more."""
    host, port = served.server.url.removeprefix("http://").split(":")
    writers = [(await asyncio.open_connection(host, int(port)))[1] for _ in range(5)]
    for writer in writers:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
    await asyncio.sleep(rng.uniform(0.1, 1.0))
    for writer in writers:
        writer.transport.abort()


async def pause_and_resume(served: Served, rng: random.Random) -> None:
    """As a trainer does it around an update of weights; what runs goes on afterwards."""
    reply = await served.client.post("/pause", params={"mode": "keep"})
    assert reply.status_code == 200, reply.text
    await asyncio.sleep(rng.uniform(0.0, 0.3))
    reply = await served.client.post("/resume")
    assert reply.status_code == 200, reply.text


async def kill_the_server(served: Served, rng: random.Random) -> None:
    send(signal.SIGKILL, served.server.process.pid)


async def end_the_server(served: Served, rng: random.Random) -> None:
    """With SIGTERM: what is in flight is answered first."""
    send(signal.SIGTERM, served.server.process.pid)


HTTP_STRIKES: dict[str, HttpStrike] = {
    "kill an instance": kill_an_instance,
    "kill all instances": kill_all_instances,
    "stop and resume an instance": stop_and_resume_an_instance,
    "stop and resume the server": stop_and_resume_the_server,
    "clients that leave": leave,
    "bodies that are no requests": send_rubbish,
    "half requests": stall,
    "pause and resume": pause_and_resume,
    "kill the server": kill_the_server,
    "end the server with SIGTERM": end_the_server,
}
ENDS = ("kill the server", "end the server with SIGTERM")
"""Of these the server does not come back by itself."""
