# SPDX-License-Identifier: Apache-2.0
"""`seer serve` while clients stream from it and it is struck: its instances, itself, and its connections.

Every stream has the tokens of an undisturbed one. A stream that broke with its server has a part of them, and the same
request to the next server has them all. Nothing is left when a server has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

import httpx

from fault_campaign import Tally, num_rounds_of, rng_of
from http_strikes import ENDS, HTTP_STRIKES, Served
from seer.engine.local.tiny import make_tiny_model
from serve_process import SMALL, a_serve_process

HTTP_ROUNDS = num_rounds_of("http")
NUM_STREAMS = 6
MAX_TOKENS = 48
DEADLINE_S = 200.0
FLEET = (
    "--instances",
    "2",
    "--pool-memory",
    "8MiB",
    "--chunk-tokens",
    "16",
    "--max-restarts",
    "100000",
    "--drain-s",
    "120",
)
Streams = dict[int, list[int]]


async def stream(client: httpx.AsyncClient, seed: int, found: list[int]) -> bool:
    """Read one response into `found`; whether it came to its end."""
    body: dict[str, Any] = {"prompt": [3 + seed, 7, 11], "seed": seed, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    with contextlib.suppress(httpx.TransportError):
        async with client.stream(
            "POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}
        ) as answer:
            if answer.status_code == 503:  # it is ending
                return False
            assert answer.status_code == 200, (await answer.aread()).decode()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return True
                if line.startswith("data: "):
                    part = json.loads(line.removeprefix("data: "))
                    assert "error" not in part, part
                    found += part["choices"][0]["token_ids"]
    return False


async def streams(client: httpx.AsyncClient) -> tuple[Streams, bool]:
    """All streams at once; whether all came to their ends."""
    found: Streams = {seed: [] for seed in range(NUM_STREAMS)}
    async with asyncio.timeout(DEADLINE_S):
        ended = await asyncio.gather(*(stream(client, seed, tokens) for seed, tokens in found.items()))
    return found, all(ended)


@contextlib.asynccontextmanager
async def a_server(model: Path, logs: Path) -> AsyncIterator[Served]:
    # A silent instance is one that hangs, after a time that is short beside a round.
    quick = ("--set", "rollout.hosting.silence_deadline_s=2", "--set", "rollout.hosting.restart_pause_s=0")
    folder = ("--set", f"rollout.hosting.log_dir={logs}")
    with a_serve_process("--model", str(model), *FLEET, *SMALL, *quick, *folder) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as client:
            yield Served(server, logs, client)


async def until_idle(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await client.get("/health")).json()["num_in_flight"]:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)


async def a_round(served: Served, kinds: list[str], rng: random.Random) -> tuple[Streams, bool]:
    async def strike() -> None:
        for kind in kinds:
            await asyncio.sleep(rng.uniform(0.0, 0.4))
            await HTTP_STRIKES[kind](served, rng)

    struck = asyncio.create_task(strike())
    result = await streams(served.client)
    await struck
    return result


def some_kinds(rng: random.Random) -> list[str]:
    """One or two; one that ends the server comes last."""
    kinds = rng.sample(list(HTTP_STRIKES), rng.choice([1, 1, 2]))
    return sorted(kinds, key=ENDS.__contains__) if not set(ENDS) <= set(kinds) else kinds[:1]


def assert_parts(found: Streams, expected: Streams, story: str) -> None:
    for seed, tokens in found.items():
        assert tokens == expected[seed][: len(tokens)], f"{story}: stream {seed} is no part of an undisturbed one"


async def rounds_on_one_server(model: Path, logs: Path, expected: Streams, tally: Tally) -> None:
    """Rounds until the server was ended by one, or there are none left."""
    async with a_server(model, logs) as served:
        while tally.goes_on(HTTP_ROUNDS):
            rng = rng_of(tally.test, tally.rounds)
            kinds = some_kinds(rng)
            found, are_whole = await a_round(served, kinds, rng)
            assert_parts(found, expected, tally.story(kinds))
            if set(kinds) & set(ENDS):
                assert are_whole or "kill the server" in kinds or not any(found.values()), tally.story(kinds)
                code = await asyncio.to_thread(served.server.process.wait, DEADLINE_S)
                assert code in (-signal.SIGKILL, 128 + signal.SIGTERM), tally.story(kinds)
                tally.check_leftovers(all_files=code > 0)
                await again_on_a_new_server(model, logs, expected, tally, kinds)
                return
            assert are_whole, tally.story(kinds)
            tally.compare(found, expected, kinds)
            await until_idle(served.client)
    tally.check_leftovers()


async def again_on_a_new_server(model: Path, logs: Path, expected: Streams, tally: Tally, kinds: list[str]) -> None:
    """The same requests have all their tokens, and the end of this server leaves nothing of both."""
    async with a_server(model, logs) as served:
        found, _ = await streams(served.client)
    tally.compare(found, expected, kinds)
    tally.check_leftovers()


def test_no_fault_changes_a_token_of_a_stream(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")

    async def undisturbed() -> Streams:
        async with a_server(model, tmp_path / "first") as served:
            found, are_whole = await streams(served.client)
        assert are_whole
        assert {len(tokens) for tokens in found.values()} == {MAX_TOKENS}
        return found

    expected = asyncio.run(undisturbed())
    tally = Tally("http")
    while tally.goes_on(HTTP_ROUNDS):
        asyncio.run(rounds_on_one_server(model, tmp_path / f"logs-{tally.rounds}", expected, tally))
        tally.save()
    tally.finish()
