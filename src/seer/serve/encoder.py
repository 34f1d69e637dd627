# SPDX-License-Identifier: Apache-2.0
"""Texts and conversations of requests to tokens, and tokens to text: the one place where endpoints use the tokenizer
on what a client sent.

Invariants
  1. A text that cannot be a prompt, because it has more characters than the longest prompt can have, is not encoded.
  2. The event loop encodes short texts only: longer ones are encoded in a thread, so that streams go on.
  3. What waits for a thread is bounded, over all requests.

Waits for                    unblocked by
  a thread                     the texts before it, the client's leaving
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from seer.engine.text_codec import ChatCodec
from seer.serve.backend import Backend, require_codec
from seer.serve.messages import plain_messages
from seer.serve.refusals import Refusal, bad_request
from seer.serve.streams import while_connected

T = TypeVar("T")
SHORT_CHARS = 1024
"""Encoded at once, in less than 5 ms. A thread costs a tenth of a millisecond."""
NUM_THREADS = 4
"""So that a long text does not hold up all others."""


class Encoder:
    """The tokenizer of a server, within bounds."""

    def __init__(self, backend: Backend, max_waiting_chars: int) -> None:
        self._backend = backend
        self._max_waiting_chars = max_waiting_chars
        self._num_waiting_chars = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="encoder")

    async def texts(
        self,
        request: Request,
        texts: Sequence[str],
        *,
        param: str,
        add_special: bool = False,
        keeps_end: bool = False,
        may_be_empty: bool = False,
    ) -> list[list[int]]:
        """The tokens of each text. `keeps_end`: of a prompt that is too long the end is used."""
        codec = require_codec(self._backend)
        if keeps_end:
            texts = [text[-self._max_chars(codec) :] for text in texts]
        for text in texts:
            self._refuse_too_long(codec, text, param)
        work = partial(_encode, codec, texts, add_special=add_special)
        found = await self._run(request, sum(map(len, texts)), work)
        return found if may_be_empty else _refuse_empty(found, param)

    async def conversations(
        self,
        request: Request,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """The tokens of each conversation, by the model's chat template."""
        codec = require_codec(self._backend)
        plain = [plain_messages(messages) for messages in conversations]

        def work() -> list[list[int]]:
            # What a template makes of messages may be shorter than they are, so its text is held against the limit.
            texts = [codec.chat_text(messages, tools, variables) for messages in plain]
            for text in texts:
                self._refuse_too_long(codec, text, "messages")
            return _encode(codec, texts)

        num_chars = sum(len(msgspec.json.encode((messages, tools, variables))) for messages in plain)
        return _refuse_empty(await self._run(request, num_chars, work), "messages")

    async def text(self, request: Request, ids: Sequence[int]) -> str:
        """The text of tokens."""
        codec = require_codec(self._backend)
        return await self._run(request, len(ids), partial(codec.decode, ids))

    async def _run(self, request: Request, num_chars: int, work: Callable[[], T]) -> T:
        """Do the work here if it is short, otherwise in a thread."""
        if num_chars <= SHORT_CHARS:
            return work()
        if self._num_waiting_chars + num_chars > self._max_waiting_chars:
            raise Refusal(429, "too much text is being encoded at once", hint="try again after Retry-After")
        self._num_waiting_chars += num_chars
        try:
            return await while_connected(request, self._in_thread(work))
        finally:
            self._num_waiting_chars -= num_chars

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _max_chars(self, codec: ChatCodec) -> int:
        return self._backend.max_model_len * codec.max_token_chars

    def _refuse_too_long(self, codec: ChatCodec, text: str, param: str) -> None:
        if len(text) > self._max_chars(codec):
            most, limit = self._max_chars(codec), self._backend.max_model_len
            raise bad_request(
                f"{param}: {len(text):,} characters, and prompt and response may have {limit:,} tokens, which are "
                f"never more than {most:,} characters",
                hint="shorten the prompt",
                param=param,
            )


def _encode(codec: ChatCodec, texts: Sequence[str], *, add_special: bool = False) -> list[list[int]]:
    return [codec.encode(text, add_special=add_special) for text in texts]


def _refuse_empty(prompts: list[list[int]], param: str) -> list[list[int]]:
    if not all(prompts):
        raise bad_request(f"{param}: a prompt has no token", hint="send text that the tokenizer knows", param=param)
    return prompts
