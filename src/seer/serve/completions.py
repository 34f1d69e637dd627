# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions: texts or token ids in, `n` responses to each, prompt by prompt.

TRL's server mode sends a whole batch in one such request, so each prompt with its `n` is a group.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from seer.ranges import TokenId
from seer.serve.choice import Ask, Choice
from seer.serve.generation import Generation
from seer.serve.logprobs import completion_logprobs, token_names
from seer.serve.refusals import bad_request
from seer.serve.reply import (
    StreamOptions,
    check_stream_options,
    reply_head,
    usage,
    usage_so_far,
    wants_usage,
)
from seer.serve.sampling_fields import SamplingFields, wants_logprobs
from seer.serve.service import Service
from seer.serve.sessions import session_of
from seer.serve.streams import event_of

Ids = list[TokenId]


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of OpenAI's and vLLM's completions."""

    model: str | None = None
    prompt: str | list[str | TokenId | Ids] | None = None
    prompt_token_ids: list[TokenId | Ids] | None = None
    """Instead of `prompt`."""
    logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    group: Annotated[str, Meta(min_length=1)] | None = None
    """Names the group of these responses; siblings that come in other requests share it."""
    session_id: str | None = None
    request_id: str | None = None
    echo: Any = None
    suffix: Any = None
    service_tier: Any = None
    metadata: Any = None

    default_max_tokens: ClassVar[int | None] = 16  # as OpenAI and vLLM have it

    def check(self) -> None:
        """Refuse what Seer does not do."""
        self.check_supported()
        if self.echo:
            raise bad_request("echo=true is not supported", hint="the client has the prompt", param="echo")
        if self.suffix:
            raise bad_request("suffix is not supported", hint="write it into the prompt", param="suffix")
        check_stream_options(self.stream, self.stream_options)


async def completions(service: Service, request: Request) -> Response:
    """Answer a request."""
    asked = await service.read(request, CompletionRequest)
    asked.check()
    service.refuse_other_model(asked.model)
    asks = await _asks(service, request, asked)
    reply = _Reply(service, asked)
    generation = service.generation(asks, streams=asked.stream, needs_text=service.backend.codec is not None)
    if asked.stream:
        return await service.stream(request, generation, reply.events(generation))
    return await service.whole(request, generation, reply.whole)


async def _asks(service: Service, request: Request, asked: CompletionRequest) -> list[Ask]:
    prompts = await _prompts(service, request, asked)
    session = session_of(request, asked.session_id)
    keep_stop, with_logprobs = bool(asked.include_stop_str_in_output), wants_logprobs(asked.logprobs)
    return [
        service.ask(ids, asked, group=asked.group, session=session, keep_stop=keep_stop, with_logprobs=with_logprobs)
        for ids in prompts
    ]


async def _prompts(service: Service, request: Request, asked: CompletionRequest) -> Sequence[Sequence[int]]:
    """The token ids of each prompt."""
    if (asked.prompt is None) == (asked.prompt_token_ids is None):
        raise bad_request("give exactly one of prompt and prompt_token_ids", param="prompt")
    given: Any = asked.prompt if asked.prompt is not None else asked.prompt_token_ids
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise bad_request("the prompt is empty", param="prompt")
    service.refuse_too_many_prompts(len(given), param="prompt")
    if all(isinstance(one, str) for one in given):
        return await service.encoder.texts(request, given, param="prompt")
    return [_ids(one) for one in given]


def _ids(prompt: Any) -> Sequence[int]:
    if not isinstance(prompt, list) or any(not isinstance(token, int) for token in prompt):
        raise bad_request("texts and token ids are mixed in one list", hint="one kind per request", param="prompt")
    if not prompt:
        raise bad_request("prompt: a prompt has no token", param="prompt")
    return prompt


class _Reply:
    """Writes the reply to one request."""

    def __init__(self, service: Service, asked: CompletionRequest) -> None:
        self._codec = service.backend.codec
        self._asked = asked
        self._with_logprobs = wants_logprobs(asked.logprobs)
        self._head = reply_head("text_completion", "cmpl", service.backend.name, asked.request_id)

    def whole(self, generation: Generation) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in generation.choices]
        return self._head | {"choices": choices, "usage": usage(generation)}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        async for choice in generation.news():
            so_far = usage_so_far(self._asked.stream_options, generation)
            yield event_of(self._head | {"choices": [self._choice(choice)]} | so_far)
        if wants_usage(self._asked.stream_options):
            yield event_of(self._head | {"choices": [], "usage": usage(generation)})

    def _choice(self, choice: Choice) -> dict[str, Any]:
        piece, asked = choice.take(), self._asked
        value: dict[str, Any] = {
            "index": choice.index,
            "text": piece.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._with_logprobs:
            as_ids = bool(asked.return_tokens_as_token_ids)
            value["logprobs"] = completion_logprobs(piece, token_names(piece.ids, self._codec, as_ids=as_ids))
        if asked.return_token_ids:
            value["token_ids"] = piece.ids
            value["prompt_token_ids"] = choice.ask.token_ids if not piece.start else None
        return value
