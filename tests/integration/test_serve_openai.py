# SPDX-License-Identifier: Apache-2.0
"""The official `openai` client against a `seer serve` process with the embedded engine on two CPU instances.

Tokens over HTTP are those of the Python API for equal seeds, with many clients at once.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")
openai = pytest.importorskip("openai")

from seer import Prompt, Sampling, SyncRollout
from seer.types import FinishReason, Response
from serve_process import SMALL, ServeProcess, a_serve_process, make_served_model

SEEDS = range(6)
NUM, MAX_TOKENS = 4, 48
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServeProcess]:
    with a_serve_process("--model", str(model), "--served-model-name", "tiny", "--instances", "2", *SMALL) as served:
        yield served


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[tuple[str, list[int], list[float]]]]:
    """Text without the token that ended it, tokens and log-probabilities of the Python API by seed."""
    prompts = [Prompt(text=f"prompt {seed}", id=str(seed), seed=seed) for seed in SEEDS]
    sampling = Sampling(max_tokens=MAX_TOKENS)
    with SyncRollout(model, instances=1, speculation="off", kv={"blocks": 512, "block_size": 4}) as rollout:
        groups = rollout.run(prompts, n=NUM, sampling=sampling)
        return {int(g.prompt_id): [(shown(r), r.token_ids, r.logprobs) for r in g.responses] for g in groups}


def shown(response: Response) -> str:
    """The tokens of this model are characters, also the one that ends a response."""
    num = len(response.token_ids) - (response.finish_reason is FinishReason.STOP)
    return "".join(map(chr, response.token_ids[:num]))


def client_of(server: ServeProcess) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def async_client_of(server: ServeProcess) -> Any:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_sync_client_gets_the_tokens_of_the_python_api(server: ServeProcess, expected: dict[int, Any]) -> None:
    client = client_of(server)
    assert [one.id for one in client.models.list()] == ["tiny"]
    for seed in SEEDS:
        reply = client.completions.create(
            model="tiny",
            prompt=f"prompt {seed}",
            n=NUM,
            seed=seed,
            max_tokens=MAX_TOKENS,
            logprobs=1,
            extra_body={"return_token_ids": True},
        )
        found = [(c.text, c.token_ids, c.logprobs.token_logprobs) for c in reply.choices]
        assert found == expected[seed]


def test_concurrent_clients_get_the_same_tokens_streamed_or_not(server: ServeProcess, expected: dict[int, Any]) -> None:
    async def whole(client: Any, seed: int) -> list[list[int]]:
        reply = await client.completions.create(
            model="tiny", prompt=f"prompt {seed}", n=NUM, seed=seed, max_tokens=MAX_TOKENS, extra_body=IDS
        )
        return [choice.token_ids for choice in reply.choices]

    async def streamed(client: Any, seed: int) -> list[list[int]]:
        stream = await client.completions.create(
            model="tiny", prompt=f"prompt {seed}", n=NUM, seed=seed, max_tokens=MAX_TOKENS, stream=True, extra_body=IDS
        )
        found: list[list[int]] = [[] for _ in range(NUM)]
        async for event in stream:
            for choice in event.choices:
                found[choice.index] += choice.token_ids
        return found

    async def scenario() -> None:
        async with async_client_of(server) as client:
            calls = [call(client, seed) for _ in range(3) for seed in SEEDS for call in (whole, streamed)]
            results = await asyncio.gather(*calls)
        wanted = [[ids for _, ids, _ in expected[seed]] for _ in range(3) for seed in SEEDS for _ in range(2)]
        assert results == wanted

    IDS = {"return_token_ids": True}
    asyncio.run(scenario())


def test_chat_streams_what_it_answers_whole_and_tools_are_in_the_prompt(server: ServeProcess) -> None:
    client = client_of(server)
    settings: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 5}
    settings |= {"max_completion_tokens": 30, "n": 2, "logprobs": True, "tools": [TOOL]}
    whole = client.chat.completions.create(**settings, extra_body={"return_token_ids": True})
    prompt = f"{json.dumps([TOOL])}<user>hi<assistant>"
    assert whole.prompt_token_ids == [ord(letter) for letter in prompt]
    texts = ["", ""]
    for event in client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content
    assert "\x02" not in "".join(texts)  # the model's end token, which is not special here
    assert texts == [choice.message.content for choice in whole.choices]
    assert event.usage == whole.usage
    for choice in whole.choices:
        assert len(choice.logprobs.content) == len(choice.token_ids)


def test_errors_are_those_of_the_client_library(server: ServeProcess) -> None:
    client = client_of(server)
    with pytest.raises(openai.BadRequestError, match="temperature=5000") as caught:
        client.completions.create(model="tiny", prompt="a", temperature=5000)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="the model is 'tiny'"):
        client.completions.create(model="gpt-5", prompt="a")


def test_stop_strings_end_the_text_where_it_would_have_gone_on(server: ServeProcess) -> None:
    client = client_of(server)
    settings: dict[str, Any] = {"model": "tiny", "prompt": "x", "seed": 11, "max_tokens": 60}
    extra: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    [free] = client.completions.create(**settings, extra_body=extra).choices
    stop = free.text[20:22]
    [cut] = client.completions.create(**settings, stop=[stop], extra_body=extra).choices
    assert cut.text == free.text[: free.text.find(stop)]
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_sigterm_lets_requests_end_and_the_exit_code_names_it(model: Path) -> None:
    async def scenario(server: ServeProcess) -> int:
        async with async_client_of(server) as client:
            extra = {"ignore_eos": True, "return_token_ids": True}
            stream = await client.completions.create(
                model="tiny", prompt="x", seed=1, max_tokens=300, stream=True, extra_body=extra
            )
            events = aiter(stream)
            num_tokens = len((await anext(events)).choices[0].token_ids)
            server.process.send_signal(signal.SIGTERM)
            async for event in events:
                num_tokens += len(event.choices[0].token_ids)
            assert event.choices[0].finish_reason == "length"
            return num_tokens

    with a_serve_process("--model", str(model), "--served-model-name", "tiny", *SMALL) as server:
        assert asyncio.run(scenario(server)) == 300
        assert server.process.wait(60) == 128 + signal.SIGTERM


def test_a_port_in_use_and_an_open_address_are_refused_before_anything_starts(
    server: ServeProcess, model: Path
) -> None:
    from seer.cli.main import main

    port = server.url.rpartition(":")[2]
    assert main(["serve", "--model", str(model), "--port", port]) == 2
    assert main(["serve", "--model", str(model), "--port", "0", "--host", "0.0.0.0"]) == 2
