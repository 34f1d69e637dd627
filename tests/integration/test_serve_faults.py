# SPDX-License-Identifier: Apache-2.0
"""Clients that vanish, readers that are slow, bodies that are no requests, and instances that are killed meanwhile.

Every request that was accepted ends once, a server that was left by all has nothing in flight, and it does not grow.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx

from faults import children_of
from serve_process import SMALL, ServeProcess, a_serve_process, make_served_model

FAKE = ("--engine", "fake", "--model", "none", "--instances", "2", "--no-pin", "--max-restarts", "100")
LONG: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 4000, "ignore_eos": True, "stream": True}
NUM_MALFORMED = int(os.environ.get("SEER_MALFORMED_BODIES", "2000"))
MIB = 1 << 20
MAX_GROWTH_BYTES = 48 * MIB
"""From a quarter of the malformed bodies to the last: caches and the allocator settle, and nothing is kept of each."""


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


SAMPLING: dict[str, Any] = {"max_tokens": 4, "temperature": 1.0, "stop": ["x"], "seed": 1, "n": 2}
SAID = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": [{"type": "text", "text": "so"}]}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "once upon", "logprobs": 1, "stream": False, **SAMPLING},
    "/v1/chat/completions": {"messages": SAID, "tools": [{"type": "function"}], "stream_options": None, **SAMPLING},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": SAMPLING, "stream": True},
    "/generate": {"text": "once", "sampling_params": {"max_new_tokens": 4, "stop": "x"}, "return_logprob": True},
    "/generate/": {"prompts": ["once", "upon"], "truncate_prompt_tokens": 3, **SAMPLING},
    "/chat/": {"messages": [SAID], "chat_template_kwargs": {"a": 1}, **SAMPLING},
    "/tokenize": {"prompt": "once", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/update_weights": {"path": "step-1"},
    "/update_named_param/": {"name": "a", "dtype": "torch.float32", "shape": [1]},
}
BAD: list[Any] = [None, -1, 1 << 70, 1.5, "x", [], {}, [[]], [None], True, float("1e308"), "\x00", "a" * 3000, "\ud800"]
BAD += [["a"], {"a": []}, "\U0001f600", [1 << 20]]


def malformed(random_: random.Random) -> tuple[str, bytes]:
    """A request with something wrong in it: bytes, a type, a range or a name."""
    path = random_.choice(list(GOOD))
    body = json.loads(json.dumps(GOOD[path]))
    for _ in range(random_.choice([1, 1, 1, 2, 3])):
        place = body
        while inner := [value for value in place.values() if isinstance(value, dict) and random_.random() < 0.5]:
            place = random_.choice(inner)
        place[random_.choice([*place, "\u2028", "messages", "prompt"])] = copy.deepcopy(random_.choice(BAD))
    data = bytearray(json.dumps(body).encode())
    for _ in range(random_.choice([0, 0, 0, 1, 8])):
        data[random_.randrange(len(data))] = random_.randrange(256)
    return path, bytes(data[: random_.choice([*[len(data)] * 4, random_.randrange(len(data))])])


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_malformed_bodies_are_refused_and_the_server_goes_on_in_the_same_memory(tmp_path: Path) -> None:
    """On a model with a tokenizer: texts, messages and stop strings are read before they are refused."""
    pytest.importorskip("torch")
    statuses: Counter[int] = Counter()

    async def scenario(server: ServeProcess) -> None:
        random_ = random.Random(0)
        limits = httpx.Limits(max_connections=16)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:

            async def one() -> None:
                path, body = malformed(random_)
                reply = await client.post(path, content=body)
                assert reply.status_code == 200 or reply.json()["error"]["message"], body
                assert reply.status_code in (200, 400, 403, 429), (path, body, reply.text)
                statuses[reply.status_code] += 1

            num_rounds, early_bytes = NUM_MALFORMED // 100, 0
            for number in range(num_rounds):
                await asyncio.gather(*(one() for _ in range(100)))
                if number == num_rounds // 4:
                    early_bytes = resident_bytes(server.process.pid)
            await until_idle(client)
            growth_bytes = resident_bytes(server.process.pid) - early_bytes
            print(f"{dict(statuses)}, {early_bytes / MIB:.0f} MiB after a quarter, {growth_bytes / MIB:+.1f} MiB since")
            assert growth_bytes < MAX_GROWTH_BYTES
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200

    model = make_served_model(tmp_path / "tiny")
    with a_serve_process("--model", str(model), *SMALL) as server:
        asyncio.run(scenario(server))
    assert min(statuses[200], statuses[400]) > NUM_MALFORMED // 100  # some are harmless


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
