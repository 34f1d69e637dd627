# SPDX-License-Identifier: Apache-2.0
"""Clients that vanish, readers that are slow, bodies that are no requests, and instances that are killed meanwhile.

Every request that was accepted ends once, and a server that was left by all has nothing in flight.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx

from faults import children_of
from serve_process import ServeProcess, a_serve_process

FAKE = ("--engine", "fake", "--model", "none", "--instances", "2", "--no-pin", "--max-restarts", "100")
LONG: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 4000, "ignore_eos": True, "stream": True}
NUM_MALFORMED = int(os.environ.get("SEER_MALFORMED_BODIES", "2000"))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def server(logs: Path) -> Iterator[ServeProcess]:
    slow = ("--set", "rollout.engine_settings.step_s=0.001", "--slow-reader-s", "0.3", "--max-in-flight", "64")
    with a_serve_process(*FAKE, *slow, "--set", f"rollout.hosting.log_dir={logs}") as served:
        yield served


async def until_idle(client: httpx.AsyncClient) -> None:
    for _ in range(6000):
        if (await client.get("/health")).json()["num_in_flight"] == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("something stayed in flight")


def test_responses_of_clients_that_leave_are_cancelled(server: ServeProcess) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for _ in range(20):
                async with client.stream("POST", "/v1/completions", json=LONG | {"n": 2}) as response:
                    assert await anext(response.aiter_bytes())
            for _ in range(5):
                with pytest.raises(httpx.ReadTimeout):
                    await client.post("/v1/completions", json=LONG | {"stream": False}, timeout=0.05)
            await until_idle(client)

    asyncio.run(scenario())


def test_a_stream_that_is_not_read_is_cut_and_others_go_on(server: ServeProcess) -> None:
    async def scenario() -> None:
        host, port = server.url.removeprefix("http://").split(":")
        # More than the buffers of two sockets hold.
        body = json.dumps(LONG | {"n": 60, "return_token_ids": True, "logprobs": 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        await writer.drain()
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            short = await client.post("/v1/completions", json={"prompt": [1], "seed": 1})
            assert short.status_code == 200
            await until_idle(client)
        received = await reader.read()
        assert received.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in received
        writer.close()

    asyncio.run(scenario())


def malformed(random_: random.Random) -> bytes:
    """A request with something wrong in it: bytes, a type, a range or a name."""
    good: dict[str, Any] = {
        "prompt": [1, 2],
        "n": 1,
        "max_tokens": 4,
        "temperature": 1.0,
        "stop": ["x"],
        "stream": False,
    }
    bad: list[Any] = [None, -1, 1 << 70, 1.5, "x", [], {}, [[]], [None], True, float("1e308"), "\x00", "a" * 1000]
    body = dict(good)
    others = ["seed", "logprobs", "messages", "prompts", "token_ids", "sampling_params", "\u2028"]
    for _ in range(random_.randint(1, 3)):
        body[random_.choice([*good, *others])] = random_.choice(bad)
    data = bytearray(json.dumps(body).encode())
    for _ in range(random_.choice([0, 0, 1, 8])):
        data[random_.randrange(len(data))] = random_.randrange(256)
    return bytes(data[: random_.choice([len(data), len(data), random_.randrange(len(data))])])


def test_malformed_bodies_are_refused_and_the_server_goes_on(server: ServeProcess) -> None:
    async def scenario() -> None:
        random_ = random.Random(0)
        paths = ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate", "/update_weights"]
        paths += ["/generate/", "/chat/", "/update_named_param/"]  # of TRL
        limits = httpx.Limits(max_connections=16)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:

            async def one() -> int:
                reply = await client.post(random_.choice(paths), content=malformed(random_))
                assert reply.status_code == 200 or reply.json()["error"]["message"]
                return reply.status_code

            for _ in range(NUM_MALFORMED // 100):
                found = await asyncio.gather(*(one() for _ in range(100)))
                assert set(found) <= {200, 400, 403, 429}
            await until_idle(client)
            assert (await client.post("/v1/completions", json={"prompt": [1]})).status_code == 200

    asyncio.run(scenario())


def test_instances_that_are_killed_change_no_token_of_a_stream(server: ServeProcess, logs: Path) -> None:
    async def tokens(client: httpx.AsyncClient, seed: int) -> list[int]:
        body = LONG | {"seed": seed, "max_tokens": 600, "return_token_ids": True}
        found: list[int] = []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    found += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
        return found

    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            expected = await asyncio.gather(*(tokens(client, seed) for seed in range(8)))
            again = [asyncio.create_task(tokens(client, seed)) for seed in range(8)]
            for _ in range(2):
                await asyncio.sleep(0.2)
                [victim, *_] = set(children_of(logs)) - {server.process.pid}
                os.kill(victim, signal.SIGKILL)
            assert await asyncio.gather(*again) == expected
            await until_idle(client)

    asyncio.run(scenario())
