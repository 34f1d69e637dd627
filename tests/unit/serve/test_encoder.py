# SPDX-License-Identifier: Apache-2.0
"""Texts of clients: too long ones are refused before they are encoded, and long ones do not hold up the server."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

pytest.importorskip("fastapi")

from seer.serve.encoder import SHORT_CHARS
from seer.serve.settings import Limits, ServeSettings
from served import MAX_MODEL_LEN, Letters, Served, a_server, until

TOO_LONG = "a" * (MAX_MODEL_LEN + 1)
LONG = "1" * (2 * SHORT_CHARS) + "ab"
"""Most of it gives no token."""
SAID = {"role": "user"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["a", TOO_LONG]},
    "/v1/chat/completions": {"messages": [SAID | {"content": TOO_LONG}]},
    "/generate": {"text": TOO_LONG},
    "/generate/": {"prompts": [TOO_LONG]},
    "/chat/": {"messages": [[SAID | {"content": TOO_LONG}]]},
    "/tokenize": {"prompt": TOO_LONG},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_text_with_more_characters_than_any_prompt_is_not_encoded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(codec: Letters, text: str, **_: Any) -> list[int]:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(Letters, "encode", encode)

    async def scenario() -> None:
        async with a_server() as served:
            reply = await served.post(path, BODIES[path])
            assert reply.status_code == 400
            message = reply.json()["error"]["message"]
            assert f"{len(TOO_LONG)} characters" in message
            assert f"{MAX_MODEL_LEN} tokens" in message

    asyncio.run(scenario())


def test_a_prompt_of_which_trl_keeps_the_end_may_be_longer() -> None:
    async def scenario() -> None:
        async with a_server() as served:
            body = {"prompts": [TOO_LONG + "bc"], "truncate_prompt_tokens": 3}
            assert (await served.ok("/generate/", body))["prompt_ids"] == [[1, 2, 3]]

    asyncio.run(scenario())


class Slow:
    """Makes the encoding of long texts wait until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = 0
        self.goes_on = threading.Event()
        monkeypatch.setattr(Letters, "max_token_chars", 100)
        monkeypatch.setattr(Letters, "encode", self._encode(Letters.encode))

    def _encode(self, encode: Any) -> Any:
        def slow(codec: Letters, text: str, **settings: Any) -> Any:
            if len(text) > SHORT_CHARS:
                self.began += 1
                assert threading.current_thread() is not threading.main_thread()
                assert self.goes_on.wait(60)
            return encode(codec, text, **settings)

        return slow


LONG_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": [SAID | {"content": LONG}]},
    "/generate": {"text": LONG},
    "/generate/": {"prompts": [LONG]},
    "/chat/": {"messages": [[SAID | {"content": LONG}]]},
    "/tokenize": {"prompt": LONG},
}


@pytest.mark.parametrize("path", LONG_BODIES)
def test_others_are_answered_while_a_long_text_is_encoded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)

    async def scenario() -> None:
        async with a_server() as served:
            waiting = asyncio.create_task(served.post(path, LONG_BODIES[path]))
            await until(lambda: slow.began == 1)
            assert (await served.get("/health")).status_code == 200
            assert (await served.post("/v1/completions", {"prompt": "short"})).status_code == 200
            assert not waiting.done()
            slow.goes_on.set()
            assert (await waiting).status_code == 200
            assert served.service.encoder._num_waiting_chars == 0

    asyncio.run(scenario())


def test_what_waits_to_be_encoded_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)

    async def ask(served: Served) -> int:
        return (await served.post("/v1/completions", {"prompt": LONG})).status_code

    async def scenario() -> None:
        limits = Limits(max_body_bytes=len(LONG) + 100)  # eight of them may wait
        async with a_server(ServeSettings(limits=limits)) as served:
            waiting = [asyncio.create_task(ask(served)) for _ in range(8)]
            await until(lambda: served.service.encoder._num_waiting_chars == 8 * len(LONG))
            assert await ask(served) == 429
            slow.goes_on.set()
            assert await asyncio.gather(*waiting) == [200] * 8
            assert await ask(served) == 200

    asyncio.run(scenario())
