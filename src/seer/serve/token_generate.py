# SPDX-License-Identifier: Apache-2.0
"""POST /inference/v1/generate: token ids in, token ids out, as vLLM 0.31 has it and SkyRL and prime-rl call it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from seer.ranges import TokenId
from seer.serve.choice import Choice
from seer.serve.generation import Generation
from seer.serve.logprobs import generate_logprobs
from seer.serve.refusals import bad_request
from seer.serve.reply import StreamOptions, check_stream_options, usage, usage_so_far, wants_usage
from seer.serve.sampling_fields import Neutral, SamplingFields, refuse_unsupported, wants_logprobs
from seer.serve.service import Service
from seer.serve.sessions import session_of
from seer.serve.streams import event_of

_NEUTRAL: Neutral = {"extra_args": (({},), "there are no plugins that read them")}


class GenerateSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params`."""

    logprobs: int | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: Any = None

    clamps_max_tokens: ClassVar[bool] = True


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of vLLM's request."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: GenerateSampling
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] | None = None
    group: Annotated[str, Meta(min_length=1)] | None = None
    """Names the group of these responses; siblings that come in other requests share it."""
    features: Any = None
    content_parts: Any = None
    cache_salt: str | None = None
    """Not looked at: KV is never shared between weights versions."""
    priority: int = 0
    """Not looked at: the scheduler orders by what it learns of groups."""
    token_offsets: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None

    def check(self) -> None:
        """Refuse what Seer does not do."""
        self.sampling_params.check_supported()
        refuse_unsupported(self.sampling_params, _NEUTRAL)
        check_stream_options(self.stream, self.stream_options)
        for name in ("features", "content_parts", "kv_transfer_params", "ec_transfer_params"):
            if getattr(self, name):
                raise bad_request(f"{name} is not supported", hint="token ids alone", param=name)


async def token_generate(service: Service, request: Request) -> Response:
    """Answer a request."""
    asked = await service.read(request, GenerateRequest)
    asked.check()
    service.refuse_other_model(asked.model)
    wanted = asked.sampling_params
    session, with_logprobs = session_of(request), wants_logprobs(wanted.logprobs)
    ask = service.ask(
        asked.token_ids, wanted, group=asked.group, session=session, keep_stop=False, with_logprobs=with_logprobs
    )
    reply = _Reply(service, asked)
    generation = service.generation([ask], streams=asked.stream, needs_text=False, name=asked.request_id)
    if asked.stream:
        return await service.stream(request, generation, reply.events(generation))
    return await service.whole(request, generation, reply.whole)


class _Reply:
    """Writes the reply to one request."""

    def __init__(self, service: Service, asked: GenerateRequest) -> None:
        self._asked = asked
        self._with_logprobs = wants_logprobs(asked.sampling_params.logprobs)
        self._head: dict[str, Any] = {
            "request_id": asked.request_id or secrets.token_hex(16),
            "model": service.backend.name,
            "output_mode": "tokens",
        }
        if asked.return_token_ids:
            self._head["prompt_token_ids"] = asked.token_ids

    def whole(self, generation: Generation) -> dict[str, Any]:
        return self._head | {
            "choices": [self._choice(choice) for choice in generation.choices],
            "usage": usage(generation),
            "prompt_logprobs": None,
        }

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        async for choice in generation.news():
            so_far = usage_so_far(self._asked.stream_options, generation)
            yield event_of(self._head | {"choices": [self._choice(choice)]} | so_far)
            self._head.pop("prompt_token_ids", None)
        if wants_usage(self._asked.stream_options):
            yield event_of(self._head | {"choices": [], "usage": usage(generation)})

    def _choice(self, choice: Choice) -> dict[str, Any]:
        piece = choice.take()
        return {
            "index": choice.index,
            "token_ids": piece.ids,
            "logprobs": generate_logprobs(piece) if self._with_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "weights_version": choice.weights_version,
        }
