# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions: messages, tools, log-probabilities and streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi")

from seer.serve.messages import plain_messages
from seer.serve.refusals import Refusal
from seer.serve.tool_calls import split_tool_calls
from served import NAME, Letters, Scripted, a_server, events_of, expected_ids

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def test_messages_and_tools_go_through_the_template() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            body = {"messages": HELLO, "tools": [TOOL, TOOL], "seed": 4, "max_tokens": 9, "return_token_ids": True}
            reply = await served.ok("/v1/chat/completions", body)
            assert reply["prompt_token_ids"] == Letters().encode("hellott")
            [choice] = reply["choices"]
            assert choice["token_ids"] == expected_ids(4, 0, 9)
            assert choice["message"] == {"role": "assistant", "content": Letters().decode(choice["token_ids"])}
            none = await served.ok("/v1/chat/completions", body | {"tool_choice": "none"})
            assert none["prompt_token_ids"] == Letters().encode("hellott")
            without = await served.ok("/v1/chat/completions", body | {"tools": []})
            assert without["prompt_token_ids"] == Letters().encode("hello")

    asyncio.run(scenario())


def test_a_stream_starts_with_the_role_and_has_the_whole_text_and_log_probabilities() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            body = {"messages": HELLO, "n": 2, "seed": 4, "max_completion_tokens": 60, "logprobs": True}
            whole = await served.ok("/v1/chat/completions", body)
            events = events_of((await served.post("/v1/chat/completions", body | {"stream": True})).text)
            for choice in whole["choices"]:
                own = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
                assert own[0]["delta"]["role"] == "assistant"
                assert "".join(one["delta"]["content"] for one in own) == choice["message"]["content"]
                content = [entry for one in own[1:] for entry in one["logprobs"]["content"]]
                assert content == choice["logprobs"]["content"]

    asyncio.run(scenario())


def test_without_max_tokens_a_response_may_fill_the_context() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            reply = await served.ok("/v1/chat/completions", {"messages": HELLO, "seed": 1, "ignore_eos": True})
            assert reply["usage"]["total_tokens"] == served.service.backend.max_model_len

    asyncio.run(scenario())


def test_tool_calls_are_read_from_the_text() -> None:
    call = '<tool_call>\n{"name": "look_up", "arguments": {"word": "seer"}}\n</tool_call>'
    text, [found] = split_tool_calls(f"I look.\n{call}")
    assert text == "I look.\n"
    assert found["function"] == {"name": "look_up", "arguments": '{"word":"seer"}'}
    assert len(split_tool_calls(call + call)[1]) == 2
    for broken in (
        "<tool_call>{</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        "none",
    ):
        assert split_tool_calls(broken) == (broken, [])


CALL = '<tool_call>{"name": "look_up", "arguments": {"word": "seer"}}</tool_call>'
REPLIES = {
    "a call": (CALL, None, ["look_up"]),
    "text and calls": (
        f"I look, 1 < 2.\n{CALL}\n{CALL.replace('look_up', 'add')}",
        "I look, 1 < 2.\n",
        ["look_up", "add"],
    ),
    "no JSON": ("So: <tool_call>{word}</tool_call> it is", "So: <tool_call>{word}</tool_call> it is", []),
    "half a call": ("So: <tool_call>{", "So: <tool_call>{", []),
    "half a tag": ("a < b, a <tool", "a < b, a <tool", []),
}


@pytest.mark.parametrize(("text", "content", "names"), REPLIES.values(), ids=REPLIES.keys())
def test_the_openai_client_gets_calls_as_calls_and_text_as_text(
    text: str, content: str | None, names: list[str]
) -> None:
    openai = pytest.importorskip("openai")
    seed = 3
    ids = expected_ids(seed, 0, 80, ignore_eos=True)
    codec = Scripted(ids, text)

    async def scenario() -> None:
        async with a_server(codec=codec) as served:
            client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=served.client)
            settings: dict[str, Any] = {"model": NAME, "messages": HELLO, "seed": seed, "max_tokens": 80}
            settings |= {"extra_body": {"stop_token_ids": [ids[codec.num_tokens]], "ignore_eos": True}}
            whole = (await client.chat.completions.create(**settings, tools=[TOOL])).choices[0]
            assert whole.message.content == content
            assert [call.function.name for call in whole.message.tool_calls or ()] == names
            assert whole.finish_reason == ("tool_calls" if names else "stop")
            stream = await client.chat.completions.create(**settings, tools=[TOOL], stream=True)
            pieces = [event.choices[0] async for event in stream]
            assert "".join(piece.delta.content for piece in pieces) == (content or "")
            calls = [call for piece in pieces for call in piece.delta.tool_calls or ()]
            assert [(call.index, call.function.name) for call in calls] == list(enumerate(names))
            assert all(call.function.arguments == '{"word":"seer"}' for call in calls)
            assert pieces[-1].finish_reason == whole.finish_reason
            none = (await client.chat.completions.create(**settings, tools=[TOOL], tool_choice="none")).choices[0]
            assert (none.message.content, none.message.tool_calls, none.finish_reason) == (text, None, "stop")

    asyncio.run(scenario())


def test_messages_of_openai_clients_become_those_of_templates() -> None:
    arguments = {"name": "look_up", "arguments": '{"word": "seer"}'}
    given: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": arguments}]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    user, assistant, tool = plain_messages(given)
    assert user["content"] == "ab"
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"word": "seer"}
    assert tool["tool_call_id"] == "1"


BAD_MESSAGES: list[list[dict[str, Any]]] = [
    [],
    [{"role": "robot", "content": "a"}],
    [{"role": "user", "content": 3}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "assistant", "content": "a", "tool_calls": [{"function": {}}]}],
    [{"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
]


@pytest.mark.parametrize("messages", BAD_MESSAGES)
def test_bad_messages_are_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(Refusal) as caught:
        plain_messages(messages)
    assert caught.value.status == 400
