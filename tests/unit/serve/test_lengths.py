# SPDX-License-Identifier: Apache-2.0
"""How long prompt and response may be: what the context and an instance's KV memory allow, as each endpoint has it."""

from __future__ import annotations

import asyncio

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
