# SPDX-License-Identifier: Apache-2.0
"""What clients ask about the server and its model: /v1/models, /health, /liveness, /version, /tokenize, /detokenize."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from seer.ranges import TokenId
from seer.serve.refusals import Refusal, bad_request, error_response, json_response
from seer.serve.sampling_fields import Neutral, refuse_unsupported
from seer.serve.service import Service

_STARTED = int(time.time())


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, or messages for the chat template."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    """Of a text: with the tokens that the tokenizer puts around each. None are added otherwise, as to prompts."""
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    return_token_strs: Any = None
    chat_template: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None

    def check(self) -> None:
        """Refuse what Seer does not do."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give exactly one of prompt and messages", param="prompt")
        refuse_unsupported(self, _NEUTRAL if self.messages is None else _NEUTRAL | _NEUTRAL_WITH_MESSAGES)


_NEUTRAL: Neutral = {
    "add_generation_prompt": ((True,), "the tokens are those of a prompt"),
    "continue_final_message": ((False,), "the tokens are those of a prompt"),
    "return_token_strs": ((False,), "the tokens' ids alone are returned"),
    "chat_template": ((), "the model's own chat template is used"),
    "media_io_kwargs": (({},), "text alone is encoded"),
    "mm_processor_kwargs": (({},), "text alone is encoded"),
}
_NEUTRAL_WITH_MESSAGES: Neutral = {"add_special_tokens": ((False,), "the chat template writes special tokens")}


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tokens to turn into text."""

    tokens: list[TokenId]
    model: str | None = None


async def models(service: Service, request: Request) -> Response:
    """GET /v1/models: the one model that is served."""
    card = {
        "id": service.backend.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "seer",
        "root": service.backend.name,
        "max_model_len": service.backend.max_model_len,
    }
    return json_response({"object": "list", "data": [card]})


async def model(service: Service, request: Request) -> Response:
    """GET /v1/models/{name}."""
    name = request.path_params["name"]
    service.refuse_other_model(name)
    return json_response(
        {"id": name, "object": "model", "created": _STARTED, "owned_by": "seer"},
    )


async def health(service: Service, request: Request) -> Response:
    """GET /health: 200 while requests are taken or will be, 503 once the server ends or has no instance left."""
    failure = service.backend.session.failure
    if failure is not None:
        return error_response(Refusal(503, str(failure), hint=failure.hint))
    if service.gate.is_draining:
        return error_response(Refusal(503, "the server ends and takes no new requests"))
    return json_response({"status": "ok", "state": service.gate.state, "num_in_flight": service.gate.num_in_flight})


async def version(service: Service, request: Request) -> Response:
    """GET /version."""
    return json_response({"version": importlib.metadata.version("seer-rollout")})


async def tokenize(service: Service, request: Request) -> Response:
    """POST /tokenize."""
    asked = await service.read(request, TokenizeRequest)
    asked.check()
    service.refuse_other_model(asked.model)
    if asked.messages is not None:
        [ids] = await service.encoder.conversations(
            request, [asked.messages], tools=asked.tools, variables=asked.chat_template_kwargs
        )
    else:
        add_special = bool(asked.add_special_tokens)
        [ids] = await service.encoder.texts(
            request, [asked.prompt or ""], param="prompt", add_special=add_special, may_be_empty=True
        )
    return json_response({"tokens": ids, "count": len(ids), "max_model_len": service.backend.max_model_len})


async def detokenize(service: Service, request: Request) -> Response:
    """POST /detokenize."""
    asked = await service.read(request, DetokenizeRequest)
    service.refuse_other_model(asked.model)
    return json_response({"prompt": await service.encoder.text(request, asked.tokens)})


async def finish_session(service: Service, request: Request) -> Response:
    """POST /finish_session?session_id=...: SkyRL says that a trajectory has ended."""
    service.groups.forget(request.query_params.get("session_id", ""))
    return json_response({"status": "ok"})
