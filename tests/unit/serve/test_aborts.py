# SPDX-License-Identifier: Apache-2.0
"""Ending requests by their names: SGLang's /abort_request and vLLM's /abort_requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi")

from served import Served, a_server, until

LONG: dict[str, Any] = {"ignore_eos": True, "seed": 1}
NUM_TOKENS = 400


def of_sglang(served: Served, rid: str) -> asyncio.Task[Any]:
    sampling = LONG | {"max_new_tokens": NUM_TOKENS}
    return asyncio.create_task(served.ok("/generate", {"input_ids": [1], "rid": rid, "sampling_params": sampling}))


def of_vllm(served: Served, request_id: str) -> asyncio.Task[Any]:
    body = {"token_ids": [1], "request_id": request_id, "sampling_params": LONG | {"max_tokens": NUM_TOKENS}}
    return asyncio.create_task(served.ok("/inference/v1/generate", body))


async def three_running(served: Served) -> list[asyncio.Task[Any]]:
    tasks = [of_sglang(served, "a"), of_sglang(served, "b"), of_vllm(served, "c")]
    await until(lambda: served.service.gate.num_in_flight == 3)
    return tasks


async def reasons(tasks: list[asyncio.Task[Any]]) -> list[str]:
    a, b, c = await asyncio.gather(*tasks)
    return [one["meta_info"]["finish_reason"]["type"] for one in (a, b)] + [c["choices"][0]["finish_reason"]]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/abort_request", {"rid": "a"}, ["abort", "length", "length"]),
        ("/abort_request", {"rid": "none of them"}, ["length", "length", "length"]),
        ("/abort_request", {"abort_all": True}, ["abort", "abort", "abort"]),
        ("/abort_requests", {"request_ids": ["b", "c"]}, ["length", "abort", "abort"]),
        ("/abort_requests", {"request_ids": []}, ["abort", "abort", "abort"]),
        ("/abort_requests", None, ["abort", "abort", "abort"]),
    ],
)
def test_what_is_named_ends_and_all_only_where_that_is_asked_for(path: str, body: Any, expected: list[str]) -> None:
    async def scenario() -> None:
        async with a_server(step_s=0.001) as served:
            tasks = await three_running(served)
            reply = await served.ok(path, body) if body is not None else (await served.client.post(path)).json()
            assert reply["aborted"] == expected.count("abort")
            assert await reasons(tasks) == expected

    asyncio.run(scenario())


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"abort_all": False}, {"request_ids": ["a"]}])
def test_an_abort_that_names_nothing_ends_nothing(body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with a_server(step_s=0.001) as served:
            tasks = await three_running(served)
            assert (await served.post("/abort_request", body)).status_code == 400
            assert await reasons(tasks) == ["length"] * 3

    asyncio.run(scenario())
