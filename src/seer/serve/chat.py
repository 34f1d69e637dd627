# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: messages and tools in by the model's chat template, `n` responses out.

A response that calls tools in the way of Hermes and Qwen, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`,
is answered with `tool_calls` if the request has tools and lets them be called. In a stream, text is held back from the
first opening tag on, and the calls come at the end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from seer.ranges import Count
from seer.serve.choice import Choice, Piece
from seer.serve.generation import Generation
from seer.serve.logprobs import chat_logprobs, token_names
from seer.serve.refusals import bad_request
from seer.serve.reply import (
    StreamOptions,
    check_stream_options,
    reply_head,
    usage,
    usage_so_far,
    wants_usage,
)
from seer.serve.sampling_fields import Neutral, SamplingFields, refuse_unsupported, wants_logprobs
from seer.serve.service import Service
from seer.serve.sessions import session_of
from seer.serve.streams import event_of
from seer.serve.tool_calls import num_before_calls, split_tool_calls

_NEUTRAL: Neutral = {"include_reasoning": ((True,), "what the model thinks is not told apart from its answer")}


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of OpenAI's and vLLM's chat completions."""

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    group: Annotated[str, Meta(min_length=1)] | None = None
    """Names the group of these responses; siblings that come in other requests share it."""
    session_id: str | None = None
    request_id: str | None = None
    parallel_tool_calls: bool | None = None
    """If false, only the first call is answered with."""
    reasoning_effort: str | None = None
    """For the chat template, as in vLLM."""
    include_reasoning: Any = None
    service_tier: Any = None
    metadata: Any = None
    store: Any = None

    def check(self) -> None:
        """Refuse what Seer does not do."""
        self.check_supported()
        refuse_unsupported(self, _NEUTRAL)
        check_stream_options(self.stream, self.stream_options)
        if self.top_logprobs and not self.logprobs:
            hint = 'send "logprobs": true too'
            raise bad_request("top_logprobs without logprobs", hint=hint, param="top_logprobs")

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside messages and tools."""
        effort = self.reasoning_effort
        own = {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort is not None else {}
        return own | (self.chat_template_kwargs or {})

    @property
    def has_calls(self) -> bool:
        """Whether calls are read from the text. With `tool_choice: none` the template shows the tools all the same, as
        in vLLM: TRL trains on such prompts.
        """
        return bool(self.tools) and self.tool_choice != "none"


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a request."""
    asked = await service.read(request, ChatRequest)
    asked.check()
    service.refuse_other_model(asked.model)
    asked.max_tokens = asked.max_completion_tokens or asked.max_tokens
    [ids] = await service.encoder.conversations(
        request, [asked.messages], tools=asked.tools or None, variables=asked.template_variables
    )
    session = session_of(request, asked.session_id)
    keep_stop = bool(asked.include_stop_str_in_output)
    ask = service.ask(
        ids, asked, group=asked.group, session=session, keep_stop=keep_stop, with_logprobs=bool(asked.logprobs)
    )
    generation = service.generation([ask], streams=asked.stream, needs_text=True)
    reply = _Reply(service, asked)
    if asked.stream:
        return await service.stream(request, generation, reply.events(generation))
    return await service.whole(request, generation, reply.whole)


class _Reply:
    """Writes the reply to one request."""

    def __init__(self, service: Service, asked: ChatRequest) -> None:
        self._codec = service.backend.codec
        self._asked = asked
        self._with_top = wants_logprobs(asked.top_logprobs, field="top_logprobs") and bool(asked.top_logprobs)
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        self._head = reply_head(kind, "chatcmpl", service.backend.name, asked.request_id)
        self._held: dict[int, str] = {}
        """By choice: text that may be a call."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        value = self._head | {
            "choices": [self._choice(choice) for choice in generation.choices],
            "usage": usage(generation),
        }
        if self._asked.return_token_ids:
            value["prompt_token_ids"] = generation.choices[0].ask.token_ids
        return value

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        prompt = generation.choices[0].ask.token_ids if self._asked.return_token_ids else None
        for choice in generation.choices:
            first = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield event_of(self._head | {"choices": [first], "prompt_token_ids": prompt})
        async for choice in generation.news():
            so_far = usage_so_far(self._asked.stream_options, generation)
            yield event_of(self._head | {"choices": [self._piece(choice)]} | so_far)
        if wants_usage(self._asked.stream_options):
            yield event_of(self._head | {"choices": [], "usage": usage(generation)})

    def _choice(self, choice: Choice) -> dict[str, Any]:
        piece = choice.take()
        text, calls = self._split(piece.text)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = calls
        reason = _finish_reason(choice, calls)
        return {"index": choice.index, "message": message, "finish_reason": reason} | self._extras(choice, piece)

    def _piece(self, choice: Choice) -> dict[str, Any]:
        piece = choice.take()
        text, calls = piece.text, []
        if self._asked.has_calls:
            text = self._held.pop(choice.index, "") + text
            calls = self._split(choice.text)[1] if choice.finish_reason is not None else []
            num = num_before_calls(text) if calls or choice.finish_reason is None else len(text)
            text, self._held[choice.index] = text[:num], text[num:]
        delta: dict[str, Any] = {"content": text}
        if calls:
            delta["tool_calls"] = [call | {"index": i} for i, call in enumerate(calls)]
        reason = _finish_reason(choice, calls)
        return {"index": choice.index, "delta": delta, "finish_reason": reason} | self._extras(choice, piece)

    def _split(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """Content and calls of a whole text."""
        if not self._asked.has_calls:
            return text, []
        content, calls = split_tool_calls(text)
        return content, calls[:1] if self._asked.parallel_tool_calls is False else calls

    def _extras(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """What is beside the message in a choice, whole or in pieces."""
        asked = self._asked
        value: dict[str, Any] = {"logprobs": None, "stop_reason": choice.stop_reason}
        if asked.logprobs:
            names = token_names(piece.ids, self._codec, as_ids=bool(asked.return_tokens_as_token_ids))
            value["logprobs"] = chat_logprobs(piece, names, with_top=self._with_top)
        if asked.return_token_ids:
            value["token_ids"] = piece.ids
        return value


def _finish_reason(choice: Choice, calls: Sequence[object]) -> str | None:
    return "tool_calls" if calls and choice.finish_reason == "stop" else choice.finish_reason
