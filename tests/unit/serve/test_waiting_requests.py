# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for `resume`: their clients may leave, and an abort may end them; a pause leaves them alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from seer.serve.app import make_app
from served import Served, a_server, events_of, expected_ids, until

COMPLETION: dict[str, Any] = {"prompt": "a", "seed": 1, "max_tokens": 5}
SGLANG: dict[str, Any] = {"input_ids": [1], "rid": "a", "sampling_params": {"max_new_tokens": 5, "n": 2}}
TOKENS: dict[str, Any] = {"token_ids": [1], "request_id": "b", "sampling_params": {"max_tokens": 5, "seed": 1}}


async def in_flight(served: Served, num_in_flight: int) -> None:
    await until(lambda: served.service.gate.num_in_flight == num_in_flight)


async def call(served: Served, body: dict[str, Any], has_left: asyncio.Event) -> list[Any]:
    """What the server sends to a client that leaves."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    path = "/v1/completions"
    scope: Any = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    await make_app(served.service)(scope | {"root_path": "", "raw_path": path.encode()}, receive, send)
    return sent


@pytest.mark.parametrize("stream", [True, False])
def test_one_whose_client_leaves_does_not_keep_its_place(stream: bool) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            await served.ok("/pause")
            has_left = asyncio.Event()
            calling = asyncio.create_task(call(served, COMPLETION | {"stream": stream, "n": 3}, has_left))
            await in_flight(served, 3)
            has_left.set()
            await calling
            assert served.service.gate.num_in_flight == 0
            assert not served.service.generations
            await served.ok("/resume")
            assert (await served.ok("/v1/completions", COMPLETION))["choices"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "ended"),
    [
        ("/abort_request", {"rid": "a"}, [True, False, False]),
        ("/abort_requests", {"request_ids": ["b"]}, [False, True, False]),
        ("/abort_request", {"abort_all": True}, [True, True, True]),
        ("/abort_requests", {}, [True, True, True]),
    ],
)
def test_an_abort_ends_those_that_it_names(path: str, body: dict[str, Any], ended: list[bool]) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            await served.ok("/pause?mode=keep")
            a = asyncio.create_task(served.ok("/generate", SGLANG))
            b = asyncio.create_task(served.ok("/inference/v1/generate", TOKENS))
            c = asyncio.create_task(served.post("/v1/completions", COMPLETION | {"stream": True}))
            await in_flight(served, 4)
            num_ended = sum(num for num, is_ended in zip((2, 1, 1), ended, strict=True) if is_ended)
            assert (await served.ok(path, body))["aborted"] == num_ended
            assert (await served.ok(path, body))["aborted"] == 0
            await in_flight(served, 4 - num_ended)
            await served.ok("/resume")
            first, second = await a
            assert first["meta_info"]["finish_reason"]["type"] == second["meta_info"]["finish_reason"]["type"]
            [choice] = (await b)["choices"]
            events = events_of((await c).text)
            reasons = [first["meta_info"]["finish_reason"]["type"], choice["finish_reason"]]
            reasons.append(events[-1]["choices"][0]["finish_reason"])
            assert [reason == "abort" for reason in reasons] == ended
            assert bool(first["output_ids"]) is not ended[0]
            assert choice["token_ids"] == ([] if ended[1] else expected_ids(1, 0, 5))
            assert not served.service.generations
            await in_flight(served, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/pause", "/sleep", "/pause?mode=wait"])
def test_another_pause_leaves_them_waiting(path: str) -> None:
    async def scenario() -> None:
        async with a_server(step_s=0.001) as served:
            await served.ok("/pause?mode=keep")
            waiting = asyncio.create_task(served.ok("/v1/completions", COMPLETION))
            await in_flight(served, 1)
            await served.ok(path)
            assert not waiting.done()
            await served.ok("/resume")
            assert (await waiting)["usage"]["completion_tokens"] == len(expected_ids(1, 0, 5))

    asyncio.run(scenario())
