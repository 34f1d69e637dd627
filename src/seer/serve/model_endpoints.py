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
from seer.serve.service import Service

_STARTED = int(time.time())


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text, or messages for the chat template."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    model: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
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
    service.refuse_other_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_request("give exactly one of prompt and messages", param="prompt")
    if asked.messages is not None:
        [ids] = await service.encoder.conversations(request, [asked.messages], tools=asked.tools)
    else:
        [ids] = await service.encoder.texts(request, [asked.prompt or ""], param="prompt", may_be_empty=True)
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
