# SPDX-License-Identifier: Apache-2.0
"""Every field of a request does what it says, asks for nothing, or is refused by its name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi")

from served import Letters, Scripted, a_server, events_of, expected_ids

COMPLETION: dict[str, Any] = {"prompt": "abc", "max_tokens": 4}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TOKENS: dict[str, Any] = {"token_ids": [1], "sampling_params": {"max_tokens": 4}}
STREAM = {"stream": True}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/inference/v1/generate": TOKENS}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown stream option": ("/v1/completions", COMPLETION | STREAM | {"stream_options": {"usage": True}}, "usage"),
    "padding": (
        "/v1/chat/completions",
        CHAT | STREAM | {"stream_options": {"include_obfuscation": True}},
        "obfuscation",
    ),
    "no stream": ("/v1/completions", COMPLETION | {"stream_options": {"include_usage": True}}, "stream_options"),
    "plugins": (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"extra_args": {"a": 1}}},
        "extra_args",
    ),
    "reasoning": ("/v1/chat/completions", CHAT | {"include_reasoning": False}, "include_reasoning"),
    "parallel": ("/v1/chat/completions", CHAT | {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    "special": ("/v1/completions", COMPLETION | {"skip_special_tokens": "no"}, "skip_special_tokens"),
    "tokenize": ("/tokenize", {"prompt": "a", "add_special": True}, "add_special"),
    "token strings": ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
    "a template": ("/tokenize", {"messages": CHAT["messages"], "chat_template": "x"}, "chat_template"),
    "special in chat": ("/tokenize", {"messages": CHAT["messages"], "add_special_tokens": True}, "add_special_tokens"),
    "detokenize": ("/detokenize", {"tokens": [1], "skip": True}, "skip"),
    "top logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3}, "top_logprobs=3 is not"),
    "top logprobs alone": ("/v1/chat/completions", CHAT | {"top_logprobs": 1}, "top_logprobs without logprobs"),
    "two folders": ("/update_weights", {"path": "a", "model_path": "b"}, "exactly one of"),
    "the best": ("/v1/completions", COMPLETION | {"n": 2, "best_of": 3}, "best_of=3"),
    "empty text": ("/generate", {"text": ""}, "text: a prompt has no token"),
    "prompt logprobs of SGLang": ("/generate", {"input_ids": [1, 2], "logprob_start_len": 0}, "logprob_start_len=0"),
    "texts of tokens": ("/generate", {"input_ids": [1], "return_text_in_logprobs": True}, "return_text_in_logprobs"),
    "a call that must be": ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, 'one of "none", "auto"'),
    "a call by its name": ("/v1/chat/completions", CHAT | {"tool_choice": {"type": "function"}}, '"none", "auto"'),
    "a begun answer": ("/v1/chat/completions", CHAT | {"continue_final_message": True}, "one of false"),
    "an unknown pause": ("/pause_generation", {"mode": "wait"}, '"retract"'),
    "unknown token": ("/generate", {"input_ids": [1 << 31]}, "input_ids"),
}


@pytest.mark.parametrize(("path", "body", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_be_ignored_is_refused_by_its_name(path: str, body: dict[str, Any], says: str) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            reply = await served.post(path, body)
            assert reply.status_code == 400, reply.text
            assert says in reply.json()["error"]["message"]
            assert "--skip-bad" not in reply.text

    asyncio.run(scenario())


def test_a_bad_prompt_is_named_by_its_place_in_the_request() -> None:
    async def scenario() -> None:
        async with a_server(vocab_size=128) as served:
            reply = await served.post("/v1/completions", {"prompt": [[1], [2, 3], [2, 128]], "max_tokens": 4})
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["message"].startswith("prompt 2: token id 128 is outside the model's vocabulary of 128")
            assert error["param"] == "prompt"

    asyncio.run(scenario())


def test_values_that_ask_for_nothing_are_taken() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            options = STREAM | {"stream_options": {"include_obfuscation": False}}
            assert (await served.post("/v1/completions", COMPLETION | options)).status_code == 200
            await served.ok("/v1/completions", COMPLETION | {"n": 3, "best_of": 3})
            await served.ok("/v1/chat/completions", CHAT | {"include_reasoning": True, "parallel_tool_calls": True})
            await served.ok("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"extra_args": {}}})
            for start in (None, -1, 2):  # the end of the prompt
                await served.ok("/generate", {"input_ids": [1, 2], "logprob_start_len": start})
            await served.ok("/generate", {"text": "a", "logprob_start_len": -1, "return_text_in_logprobs": False})
            await served.ok("/tokenize", {"messages": CHAT["messages"], "add_generation_prompt": True})

    asyncio.run(scenario())


@pytest.mark.parametrize("path", PATHS)
def test_every_event_may_have_the_usage_so_far(path: str) -> None:
    async def scenario() -> None:
        async with a_server() as served:
            options = {"include_usage": True, "continuous_usage_stats": True}
            events = events_of((await served.post(path, PATHS[path] | STREAM | {"stream_options": options})).text)
            counts = [event["usage"]["completion_tokens"] for event in events if "usage" in event]
            assert len(counts) >= len(events) - 1  # a chat starts with an event that has the role alone
            assert counts == sorted(counts)
            assert counts[-2:] == [counts[-1]] * 2

    asyncio.run(scenario())


def test_a_reply_has_the_id_that_the_client_gave() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            given = {"request_id": "mine"}
            assert (await served.ok("/v1/completions", COMPLETION | given))["id"] == "cmpl-mine"
            assert (await served.ok("/v1/chat/completions", CHAT | given))["id"] == "chatcmpl-mine"

    asyncio.run(scenario())


def test_special_tokens_are_added_to_a_text_that_is_tokenized_if_wanted() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            for wanted, ids in ((None, [1, 2]), (False, [1, 2]), (True, [30, 1, 2])):
                reply = await served.ok("/tokenize", {"prompt": "ab", "add_special_tokens": wanted})
                assert (reply["tokens"], reply["count"]) == (ids, len(ids))
            assert (await served.ok("/tokenize", {"prompt": ""}))["tokens"] == []

    asyncio.run(scenario())


def test_special_tokens_are_in_the_text_if_wanted_but_not_the_one_that_ended_it() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            ids = expected_ids(3, 0, 30)
            body = {"prompt": "a", "seed": 3, "max_tokens": 30, "skip_special_tokens": False}
            for kept, text in ((False, Letters().decode(ids)), (True, Letters().decode(ids, skip_special=False))):
                settings = body | {"include_stop_str_in_output": kept}
                [choice] = (await served.ok("/v1/completions", settings))["choices"]
                assert choice["text"] == text
                events = events_of((await served.post("/v1/completions", settings | STREAM)).text)
                assert "".join(event["choices"][0]["text"] for event in events) == text
            assert text.endswith(".")

    asyncio.run(scenario())


def test_the_template_gets_the_effort_and_only_one_call_is_answered_if_no_more_are_wanted() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    ids = expected_ids(3, 0, 80, ignore_eos=True)
    codec = Scripted(ids, call + call)

    async def scenario() -> None:
        async with a_server(codec=codec) as served:
            tool = {"type": "function", "function": {"name": "f"}}
            body = CHAT | {"tools": [tool], "seed": 3, "max_tokens": codec.num_tokens, "ignore_eos": True}
            body |= {"parallel_tool_calls": False, "reasoning_effort": "low", "return_token_ids": True}
            reply = await served.ok("/v1/chat/completions", body)
            assert reply["prompt_token_ids"] == Letters().encode("hitlow")
            assert len(reply["choices"][0]["message"]["tool_calls"]) == 1
            events = events_of((await served.post("/v1/chat/completions", body | STREAM)).text)
            assert len(events[-1]["choices"][0]["delta"]["tool_calls"]) == 1

    asyncio.run(scenario())
