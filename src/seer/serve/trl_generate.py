# SPDX-License-Identifier: Apache-2.0
"""POST /generate/ and /chat/ of `trl vllm-serve`: a batch of prompts in, token ids and log-probabilities out.

TRL changed the form of the log-probabilities once: requests that have the field `logprobs` get a list for each token,
those of earlier clients a number. Token ids of responses are in the order of the prompts, `n` for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from seer.ranges import INT32_MAX, TokenId
from seer.serve.choice import Choice
from seer.serve.generation import Generation
from seer.serve.refusals import bad_request
from seer.serve.sampling_fields import SamplingFields
from seer.serve.service import Service
from seer.serve.sessions import session_of

TruncatedTo = Annotated[int, Meta(ge=-1, le=INT32_MAX)]


class GenerationKwargs(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`generation_kwargs`: fields of vLLM's SamplingParams, which win over those beside them."""

    logprobs: int | None = None
    truncate_prompt_tokens: TruncatedTo | None = None


class TrlSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take beside the prompts."""

    logprobs: int | UnsetType | None = UNSET
    truncate_prompt_tokens: TruncatedTo | None = None
    guided_decoding_regex: str | None = None
    structured_outputs_regex: str | None = None
    generation_kwargs: GenerationKwargs | None = None

    default_max_tokens: ClassVar[int | None] = 16  # TRL's own
    clamps_max_tokens: ClassVar[bool] = True

    def settle(self) -> int | None:
        """Apply `generation_kwargs` and refuse what Seer does not do; returns how many tokens of a prompt stay."""
        for name in GenerationKwargs.__struct_fields__ if self.generation_kwargs is not None else ():
            value = getattr(self.generation_kwargs, name)
            if value is not None:
                setattr(self, name, value)
        kept, self.truncate_prompt_tokens = self.truncate_prompt_tokens, None
        if kept == 0:
            hint = "at least 1, or -1 for whole prompts"
            raise bad_request("truncate_prompt_tokens=0 leaves no prompt", hint=hint, param="truncate_prompt_tokens")
        self.structured_outputs = (
            self.structured_outputs or self.structured_outputs_regex or self.guided_decoding_regex or None
        )
        self.check_supported()
        if self.logprobs not in (UNSET, None, 0):
            why = "only the log-probability of the sampled token is reported: 0"
            raise bad_request(f"logprobs={self.logprobs} is not supported", hint=why, param="logprobs")
        return None if kept in (None, -1) else kept


class TrlGenerate(TrlSampling, kw_only=True, forbid_unknown_fields=True):
    """Body of /generate/."""

    prompts: Annotated[list[str | list[TokenId]], Meta(min_length=1)]
    images: list[Any] | None = None


class TrlChat(TrlSampling, kw_only=True, forbid_unknown_fields=True):
    """Body of /chat/."""

    messages: Annotated[list[list[dict[str, Any]]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def trl_generate(service: Service, request: Request) -> Response:
    """POST /generate/."""
    asked = await service.read(request, TrlGenerate)
    if asked.images and any(one is not None for one in asked.images):
        raise bad_request("images are not supported", hint="send text or token ids alone", param="images")
    service.refuse_too_many_prompts(len(asked.prompts), param="prompts")
    kept = asked.settle()
    texts = [one for one in asked.prompts if isinstance(one, str)]
    keeps_end = kept is not None
    encoded = iter(await service.encoder.texts(request, texts, param="prompts", keeps_end=keeps_end) if texts else ())
    prompts = [next(encoded) if isinstance(one, str) else one for one in asked.prompts]
    return await _answer(service, request, asked, prompts, kept)


async def trl_chat(service: Service, request: Request) -> Response:
    """POST /chat/."""
    asked = await service.read(request, TrlChat)
    service.refuse_too_many_prompts(len(asked.messages), param="messages")
    kept = asked.settle()
    prompts = await service.encoder.conversations(
        request, asked.messages, tools=asked.tools, variables=asked.chat_template_kwargs
    )
    return await _answer(service, request, asked, prompts, kept)


async def _answer(
    service: Service, request: Request, asked: TrlSampling, prompts: Sequence[Sequence[int]], kept: int | None
) -> Response:
    """`kept`: tokens that stay of a prompt."""
    if not all(prompts):
        raise bad_request("a prompt has no token", param="prompts")
    if kept is not None:
        prompts = [prompt[-kept:] for prompt in prompts]
    await service.named_params.settle()
    session = session_of(request)
    with_logprobs = asked.logprobs is not None
    asks = [
        service.ask(ids, asked, group=None, session=session, keep_stop=False, with_logprobs=with_logprobs)
        for ids in prompts
    ]
    generation = service.generation(asks, streams=False, needs_text=False)

    def reply(ended: Generation) -> dict[str, Any]:
        completions = [list(choice.ids) for choice in ended.choices]
        return {"prompt_ids": prompts, "completion_ids": completions} | _logprobs(asked, ended.choices)

    return await service.whole(request, generation, reply)


def _logprobs(asked: TrlSampling, choices: Sequence[Choice]) -> dict[str, Any]:
    if asked.logprobs is UNSET:
        return {"logprobs": [list(choice.logprobs) for choice in choices]}
    if asked.logprobs is None:
        return {"logprobs": None, "logprob_token_ids": None}
    return {
        "logprobs": [[[value] for value in choice.logprobs] for choice in choices],
        "logprob_token_ids": [[[token] for token in choice.ids] for choice in choices],
    }
