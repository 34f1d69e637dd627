# SPDX-License-Identifier: Apache-2.0
"""/v1/completions: prompts, groups, seeds, stop strings, streams, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi")

from seer.runs.response_handle import ResponseHandle
from seer.types import FinishReason
from served import MAX_MODEL_LEN, NAME, Letters, a_server, events_of, expected_ids

IDS: dict[str, Any] = {"return_token_ids": True}


def test_each_prompt_gets_n_responses_prompt_by_prompt_and_by_its_seed() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            body = {"prompt": [[1, 2], [3, 4, 5]], "n": 3, "seed": 7, "max_tokens": 20, "logprobs": 0, **IDS}
            reply = await served.ok("/v1/completions", body)
            assert reply["model"] == NAME
            assert [choice["index"] for choice in reply["choices"]] == list(range(6))
            expected = [expected_ids(7, i, 20) for i in range(3)] * 2  # equal seeds give equal tokens
            assert [choice["token_ids"] for choice in reply["choices"]] == expected
            assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [[1, 2]] * 3 + [[3, 4, 5]] * 3
            num = sum(map(len, expected))
            assert reply["usage"] == {"prompt_tokens": 5, "completion_tokens": num, "total_tokens": 5 + num}
            for choice in reply["choices"]:
                assert choice["text"] == Letters().decode(choice["token_ids"])
                assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])

    asyncio.run(scenario())


def test_texts_are_encoded_and_tokens_are_named_by_text_or_by_id() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            body = {"prompt": "abc", "seed": 1, "logprobs": 1, "max_tokens": 9, **IDS}
            [choice] = (await served.ok("/v1/completions", body))["choices"]
            assert choice["prompt_token_ids"] == [1, 2, 3]
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            named = {"return_tokens_as_token_ids": True}
            [choice] = (await served.ok("/v1/completions", body | named))["choices"]
            assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]

    asyncio.run(scenario())


def test_a_stream_has_the_tokens_and_the_text_of_the_whole_answer() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            body = {"prompt": "abc", "n": 2, "seed": 3, "max_tokens": 100, "logprobs": 0, **IDS}
            whole = await served.ok("/v1/completions", body)
            options = {"stream": True, "stream_options": {"include_usage": True}}
            response = await served.post("/v1/completions", body | options)
            assert response.headers["content-type"].startswith("text/event-stream")
            *pieces, last = events_of(response.text)
            assert last["usage"] == whole["usage"]
            for choice in whole["choices"]:
                own = [one for event in pieces for one in event["choices"] if one["index"] == choice["index"]]
                assert [token for one in own for token in one["token_ids"]] == choice["token_ids"]
                assert "".join(one["text"] for one in own) == choice["text"]
                values = [value for one in own for value in one["logprobs"]["token_logprobs"]]
                assert values == choice["logprobs"]["token_logprobs"]
                assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_stop_string_ends_a_response_at_the_token_that_completes_it(is_kept: bool) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            ids = expected_ids(5, 0, 200, ignore_eos=True)
            text = Letters().decode(ids)
            stop = text[40:43]
            at = text.find(stop)
            body = {"prompt": "a", "seed": 5, "max_tokens": 200, "ignore_eos": True, "stop": ["never", stop], **IDS}
            [choice] = (await served.ok("/v1/completions", body | {"include_stop_str_in_output": is_kept}))["choices"]
            assert choice["text"] == text[: at + 3 if is_kept else at]
            assert choice["token_ids"] == ids[: at + 3]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
            streamed = await served.post("/v1/completions", body | {"stream": True})
            pieces = [event["choices"][0] for event in events_of(streamed.text)]
            assert "".join(piece["text"] for piece in pieces) == text[:at]

    asyncio.run(scenario())


def test_a_stop_string_ends_the_response_as_the_model_does_and_not_before_min_tokens() -> None:
    """The scheduler learns a length from it, and metrics count it as stopped."""

    async def scenario() -> None:
        async with a_server() as served:
            handles: list[ResponseHandle] = []
            submit = served.service.backend.session.submit

            def noting(*arguments: Any, **settings: Any) -> Any:
                handles.extend(submit(*arguments, **settings))
                return handles[-1:]

            served.service.backend.session.submit = noting  # type: ignore[method-assign]
            ids = expected_ids(5, 0, 200, ignore_eos=True)
            text = Letters().decode(ids)
            stop = text[4]
            body = {"prompt": "a", "seed": 5, "max_tokens": 200, "ignore_eos": True, "stop": stop, **IDS}
            for min_tokens in (0, 30):
                at = text.find(stop, min_tokens)
                for stream in (False, True):
                    settings = {"min_tokens": min_tokens, "stream": stream}
                    response = await served.post("/v1/completions", body | settings)
                    found = events_of(response.text) if stream else [response.json()]
                    choices = [choice for one in found for choice in one["choices"]]
                    assert "".join(choice["text"] for choice in choices) == text[:at]
                    ended = await handles[-1]
                    assert (ended.finish_reason, ended.token_ids) == (FinishReason.STOP, ids[: at + 1])
            lines = (await served.get("/metrics")).text.splitlines()
            [counted] = [line for line in lines if 'finished_reason="stop"' in line]
            assert float(counted.split()[-1]) == 4

    asyncio.run(scenario())


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_stop_token_is_named_and_its_text_left_out(is_kept: bool) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            ids = expected_ids(5, 0, 200, ignore_eos=True)
            at = ids.index(ids[40])
            body = {"prompt": "a", "seed": 5, "max_tokens": 200, "ignore_eos": True, **IDS}
            body |= {"stop_token_ids": [ids[40]], "include_stop_str_in_output": is_kept}
            text = Letters().decode(ids[: at + 1 if is_kept else at])
            [choice] = (await served.ok("/v1/completions", body))["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[40])
            assert (choice["token_ids"], choice["text"]) == (ids[: at + 1], text)
            streamed = events_of((await served.post("/v1/completions", body | {"stream": True})).text)
            assert "".join(event["choices"][0]["text"] for event in streamed) == text

    asyncio.run(scenario())


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({}, "exactly one of prompt and prompt_token_ids"),
    "two prompts": ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one of"),
    "empty": ({"prompt": []}, "the prompt is empty"),
    "no token": ({"prompt": "123"}, "a prompt has no token"),
    "mixed": ({"prompt": [1, "a"]}, "texts and token ids are mixed"),
    "a fraction": ({"prompt": [1.5]}, "prompt"),
    "n is 0": ({"prompt": "a", "n": 0}, "n=0: expected `int` >= 1"),
    "too hot": ({"prompt": "a", "temperature": 1e9}, "temperature=1000000000.0: expected `float` <= 1000.0"),
    "misspelt": ({"prompt": "a", "max_token": 4}, "unknown field 'max_token'"),
    "too long": (
        {"prompt": "a", "max_tokens": 4000},
        f"length is {MAX_MODEL_LEN} tokens with the response; the prompt has 1 tokens, and max_tokens=4,000",
    ),
    "long prompt": ({"prompt": [1] * MAX_MODEL_LEN}, f"the prompt has {MAX_MODEL_LEN} tokens"),
    "penalty": ({"prompt": "a", "repetition_penalty": 1.2}, "repetition_penalty=1.2 is not supported"),
    "top logprobs": ({"prompt": "a", "logprobs": 5}, "logprobs=5 is not supported"),
    "prompt logprobs": ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs=1 is not supported"),
    "echo": ({"prompt": "a", "echo": True}, "echo=true is not supported"),
    "grammar": ({"prompt": "a", "structured_outputs": {"regex": "a"}}, "structured output is not supported"),
    "too many": ({"prompt": "a", "n": 65_536}, "65,536 responses in one request, at most 4,096"),
    "min over max": ({"prompt": "a", "max_tokens": 4, "min_tokens": 5}, "min_tokens=5 is out of range"),
}


@pytest.mark.parametrize(("body", "says"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_done_is_refused_with_what_got_and_limit(body: dict[str, Any], says: str) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            response = await served.post("/v1/completions", body)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error")
            assert says in error["message"]
            assert served.service.gate.num_in_flight == 0

    asyncio.run(scenario())


def test_neutral_values_of_what_is_not_supported_are_taken() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            body = {
                "prompt": "a",
                "seed": 1,
                "repetition_penalty": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "best_of": 1,
                "presence_penalty": 0,
                "logit_bias": {},
                "user": "me",
                "echo": False,
                "model": NAME,
            }
            assert (await served.post("/v1/completions", body)).status_code == 200

    asyncio.run(scenario())


def test_another_model_is_not_found() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            response = await served.post("/v1/completions", {"prompt": "a", "model": "other"})
            assert response.status_code == 404
            assert NAME in response.json()["error"]["message"]

    asyncio.run(scenario())


def test_a_model_without_a_tokenizer_takes_token_ids() -> None:
    async def scenario() -> None:
        async with a_server(codec=None) as served:
            assert (await served.post("/v1/completions", {"prompt": "a"})).status_code == 400
            assert (await served.post("/v1/completions", {"prompt": [1], "stop": "x"})).status_code == 400
            reply = await served.ok("/v1/completions", {"prompt": [1], "logprobs": 0, "seed": 2, **IDS})
            [choice] = reply["choices"]
            assert choice["token_ids"] == expected_ids(2, 0, 16)
            assert choice["text"] == ""

    asyncio.run(scenario())
