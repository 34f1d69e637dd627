# SPDX-License-Identifier: Apache-2.0
"""How long prompt and response may be: what the context and an instance's KV memory allow, as each endpoint has it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi")

from served import BLOCK_SIZE, MAX_MODEL_LEN, a_server

KV_BLOCKS = 24
HELD_TOKENS = KV_BLOCKS * BLOCK_SIZE
assert HELD_TOKENS < MAX_MODEL_LEN


def test_a_response_without_max_tokens_fits_an_instance_whose_kv_is_shorter_than_the_context() -> None:
    async def scenario() -> None:
        async with a_server(kv_blocks=KV_BLOCKS) as served:
            body = {"messages": [{"role": "user", "content": "ab"}], "ignore_eos": True}
            chat = await served.ok("/v1/chat/completions", body)
            assert chat["usage"]["total_tokens"] == HELD_TOKENS
            ids = {"token_ids": [1, 2], "sampling_params": {"ignore_eos": True}}
            tokens = await served.ok("/inference/v1/generate", ids)
            assert tokens["usage"]["total_tokens"] == HELD_TOKENS

    asyncio.run(scenario())


def test_every_endpoint_tells_the_length_that_it_takes() -> None:
    async def scenario() -> None:
        async with a_server(kv_blocks=KV_BLOCKS) as served:
            [card] = (await served.get("/v1/models")).json()["data"]
            info = (await served.get("/server_info")).json()["vllm_config"]["model_config"]
            told = await served.ok("/tokenize", {"prompt": "a"})
            assert [one["max_model_len"] for one in (card, info, told)] == [HELD_TOKENS] * 3

    asyncio.run(scenario())


BEYOND: dict[str, Any] = {"max_tokens": MAX_MODEL_LEN, "min_tokens": MAX_MODEL_LEN, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": BEYOND}),
        ("/generate/", {"prompts": [[1, 2]], "max_tokens": MAX_MODEL_LEN, "generation_kwargs": {"ignore_eos": True}}),
    ],
)
def test_token_endpoints_end_a_response_where_the_context_ends(path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            reply = await served.ok(path, body)
            if path == "/generate/":
                assert [len(ids) for ids in reply["completion_ids"]] == [MAX_MODEL_LEN - 2]
                return
            [choice] = reply["choices"]
            assert (len(choice["token_ids"]), choice["finish_reason"]) == (MAX_MODEL_LEN - 2, "length")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab", "max_tokens": MAX_MODEL_LEN}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "max_tokens": MAX_MODEL_LEN}),
        ("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": MAX_MODEL_LEN}}),
        ("/v1/completions", {"prompt": "a" * MAX_MODEL_LEN}),
        ("/inference/v1/generate", {"token_ids": [1] * MAX_MODEL_LEN, "sampling_params": {"max_tokens": 1}}),
        ("/generate", {"input_ids": [1] * (MAX_MODEL_LEN + 9), "sampling_params": {"max_new_tokens": 1}}),
    ],
)
def test_what_is_too_long_is_refused_in_words_that_clients_know(path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            response = await served.post(path, body)
            assert response.status_code == 400
            message = response.json()["error"]["message"]
            assert f"this model's maximum context length is {MAX_MODEL_LEN} tokens" in message  # as verifiers looks
            assert "Hint: " in message

    asyncio.run(scenario())
