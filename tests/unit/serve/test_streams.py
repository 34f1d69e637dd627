# SPDX-License-Identifier: Apache-2.0
"""Streams end with their events, their client, or the patience with a slow reader; text streams lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from builders import a_response
from seer.engine.stop_strings import StopStrings
from seer.serve.choice import Ask, Choice
from seer.serve.streams import DONE, EventStream, event_of
from seer.types import FinishReason, Sampling, TokenSpan


class Utf8:
    """A tokenizer whose tokens are bytes, so that a character may be several tokens."""

    max_token_chars = 1

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> list[int]:
        raise NotImplementedError

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *_: Any) -> str:
        raise NotImplementedError

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(tokens).decode("utf-8", "replace")


async def stream(events: AsyncGenerator[bytes, None], receive: Any, send: Any) -> int:
    closes = 0

    def on_close() -> None:
        nonlocal closes
        closes += 1

    await EventStream(events, on_close=on_close, slow_reader_s=0.05)({"type": "http"}, receive, send)
    return closes


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def three() -> AsyncGenerator[bytes, None]:
    for number in range(3):
        yield event_of(number)


def test_a_stream_sends_its_events_and_its_end() -> None:
    async def scenario() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        assert await stream(three(), never, send) == 1
        bodies = [message["body"] for message in sent[1:]]
        assert bodies == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n", DONE, b""]
        assert [message["more_body"] for message in sent[1:]] == [True] * 4 + [False]

    asyncio.run(scenario())


def test_an_error_in_a_stream_is_its_last_event() -> None:
    async def failing() -> AsyncGenerator[bytes, None]:
        yield event_of(0)
        raise ValueError("a bug")

    async def scenario() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        assert await stream(failing(), never, send) == 1
        assert b'"type":"server_error"' in sent[2]["body"]
        assert b"a bug" not in sent[2]["body"]
        assert sent[-1]["more_body"] is False

    asyncio.run(scenario())


def test_a_stream_ends_when_its_client_leaves_or_takes_nothing() -> None:
    async def waiting() -> AsyncGenerator[bytes, None]:
        yield event_of(0)
        await asyncio.Event().wait()

    async def scenario() -> None:
        async def gone() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def take(message: Any) -> None:
            pass

        async def take_nothing(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        assert await stream(waiting(), gone, take) == 1
        assert await stream(three(), never, take_nothing) == 1

    asyncio.run(scenario())


@given(
    st.text(alphabet="abé€😀", max_size=40),
    st.lists(st.text(alphabet="abé€😀", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 7), min_size=1, max_size=5),
    st.booleans(),
)
def test_text_in_pieces_is_the_whole_text_up_to_the_first_stop_string(
    text: str, stops: list[str], sizes: list[int], keep_stop: bool
) -> None:
    ids = Utf8().encode(text)
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    end, start, stop = min(ends, default=(len(text), len(text), None))
    until = StopStrings(Utf8().decode, stops).find(ids, len(ids)) if stops else None
    assert until == (len(text[:end].encode()) if ends else None)  # as instances end it
    ids = ids[:until]
    sampling = Sampling(max_tokens=1000, stop=tuple(stops))
    choice = Choice(0, Ask(token_ids=[1], n=1, sampling=sampling, keep_stop=keep_stop), Utf8(), has_text=True)
    shown, at = "", 0
    while at < len(ids):
        piece = ids[at : at + sizes[at % len(sizes)]]
        at += len(piece)
        choice.add(TokenSpan(piece, [0.0] * len(piece), 0))
        shown += choice.take().text
    choice.end(a_response(ids, finish_reason=FinishReason.STOP if ends else FinishReason.LENGTH))
    shown += choice.take().text
    assert shown == choice.text == text[: end if keep_stop else start]
    assert (choice.stop_reason, choice.ids) == (stop, ids)


def test_the_text_of_a_stop_token_is_left_out_of_the_text_unless_it_is_wanted() -> None:
    for keep_stop, text in ((False, "a\N{EURO SIGN}"), (True, "a\N{EURO SIGN}b")):
        sampling = Sampling(max_tokens=1000, stop_token_ids=(ord("b"),))
        choice = Choice(0, Ask(token_ids=[1], n=1, sampling=sampling, keep_stop=keep_stop), Utf8(), has_text=True)
        choice.end(a_response(Utf8().encode("a\N{EURO SIGN}b")))
        assert (choice.text, choice.stop_reason) == (text, ord("b"))
