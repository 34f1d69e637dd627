# SPDX-License-Identifier: Apache-2.0
"""SGLang's POST /generate, as slime calls it.

slime reads the tokens from `meta_info.output_token_logprobs`, a list of [log-probability, token id, text].
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from seer.ranges import Count, CountOrZero, TokenId
from seer.serve.choice import Choice
from seer.serve.generation import Generation
from seer.serve.refusals import bad_request
from seer.serve.sampling_fields import Neutral, SamplingFields, SignedSeed, refuse_unsupported
from seer.serve.service import Service
from seer.serve.sessions import session_of
from seer.serve.streams import event_of

_NO_PROMPT_LOGPROBS = "log-probabilities of the prompt are not computed: -1, or leave it out"
_NO_TEXTS = "tokens are named by their ids: decode them with POST /detokenize"


class SglangSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params`; the names that differ from vLLM's."""

    max_new_tokens: Count | None = None
    min_new_tokens: CountOrZero | None = None
    sampling_seed: SignedSeed | None = None
    no_stop_trim: bool | None = None
    custom_params: Any = None

    default_max_tokens: ClassVar[int | None] = 128  # SGLang's own

    def __post_init__(self) -> None:
        """Give the common names their values."""
        self.max_tokens = self.max_new_tokens or self.max_tokens
        self.min_tokens = self.min_new_tokens or self.min_tokens
        self.seed = self.sampling_seed if self.sampling_seed is not None else self.seed
        self.include_stop_str_in_output = self.no_stop_trim


class SglangRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of SGLang's request, for one prompt."""

    input_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    text: str | None = None
    sampling_params: SglangSampling = msgspec.field(default_factory=SglangSampling)
    return_logprob: bool | None = None
    stream: bool | None = None
    rid: str | None = None
    group: Annotated[str, Meta(min_length=1)] | None = None
    """Names the group of these responses; siblings that come in other requests share it."""
    image_data: Any = None
    return_routed_experts: Any = None
    logprob_start_len: Any = None
    top_logprobs_num: Any = None
    return_text_in_logprobs: Any = None

    def check(self) -> None:
        """Refuse what Seer does not do."""
        self.sampling_params.check_supported()
        starts = (-1, len(self.input_ids)) if self.input_ids is not None else (-1,)
        neutral: Neutral = {
            "logprob_start_len": (starts, _NO_PROMPT_LOGPROBS),
            "return_text_in_logprobs": ((False,), _NO_TEXTS),
        }
        refuse_unsupported(self, neutral)
        for name in ("image_data", "return_routed_experts", "top_logprobs_num"):
            if getattr(self, name):
                raise bad_request(f"{name} is not supported", param=name)
        if self.sampling_params.custom_params:
            why = "the tokens that top_p leaves are not reported: slime asks for them unless --rollout-top-p is 1"
            raise bad_request("custom_params is not supported", hint=why, param="custom_params")
        if (self.input_ids is None) == (self.text is None):
            raise bad_request("give exactly one of input_ids and text", param="input_ids")


async def sglang_generate(service: Service, request: Request) -> Response:
    """Answer a request."""
    asked = await service.read(request, SglangRequest)
    asked.check()
    wanted = asked.sampling_params
    ids = asked.input_ids
    if ids is None:
        [ids] = await service.encoder.texts(request, [asked.text or ""], param="text")
    keep_stop, with_logprobs = bool(wanted.include_stop_str_in_output), bool(asked.return_logprob)
    ask = service.ask(
        ids,
        wanted,
        group=asked.group,
        session=session_of(request),
        keep_stop=keep_stop,
        with_logprobs=with_logprobs,
    )
    reply = _Reply(service, asked, len(ids))
    generation = service.generation([ask], streams=asked.stream, needs_text=True, name=asked.rid)
    if asked.stream:
        return await service.stream(request, generation, reply.events(generation))
    return await service.whole(request, generation, reply.whole)


class _Reply:
    """Writes the reply to one request; a stream repeats all there is so far, as SGLang does."""

    def __init__(self, service: Service, asked: SglangRequest, num_prompt_tokens: int) -> None:
        self._backend = service.backend
        self._asked = asked
        self._num_prompt_tokens = num_prompt_tokens
        self._id = asked.rid or secrets.token_hex(16)

    def whole(self, generation: Generation) -> Any:
        values = [self._value(choice) for choice in generation.choices]
        return values[0] if len(values) == 1 else values

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        async for choice in generation.news():
            choice.take()
            yield event_of(self._value(choice) | {"index": choice.index})

    def _value(self, choice: Choice) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._id,
            "finish_reason": _finish_reason(choice),
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": len(choice.ids),
            "weight_version": str(self._weights_version(choice)),
        }
        if self._asked.return_logprob:
            pairs = zip(choice.logprobs, choice.ids, strict=True)
            meta["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
        return {"text": choice.text, "output_ids": list(choice.ids), "meta_info": meta}

    def _weights_version(self, choice: Choice) -> int:
        """Of a response that runs it is the server's: weights do not change before it has ended."""
        known = choice.weights_version
        return self._backend.weights_version if known is None else known


def _finish_reason(choice: Choice) -> dict[str, Any] | None:
    """As SGLang has it: an object with what was matched, or how long it is."""
    if choice.finish_reason is None:
        return None
    reason: dict[str, Any] = {"type": choice.finish_reason}
    if choice.finish_reason == "stop":
        end_token = choice.ids[-1] if choice.ids else None
        reason["matched"] = end_token if choice.stop_reason is None else choice.stop_reason
    elif choice.finish_reason == "length":
        reason["length"] = len(choice.ids)
    return reason
