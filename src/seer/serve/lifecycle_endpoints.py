# SPDX-License-Identifier: Apache-2.0
"""The endpoints of pauses: /pause, /resume, /is_paused, /sleep, /wake_up, /is_sleeping, /abort_requests."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from seer.serve.lifecycle import MODES
from seer.serve.refusals import bad_request, json_response
from seer.serve.service import Service


class AbortRequests(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /abort_requests, which may be empty."""

    request_ids: list[str] | None = None


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /abort_request."""

    rid: str | None = None
    abort_all: bool = False
    finished_reason: Any = None
    abort_message: Any = None


async def pause(service: Service, request: Request) -> Response:
    """POST /pause?mode=abort|wait|keep."""
    await service.lifecycle.pause(_mode(request))
    return json_response({"status": "paused"})


async def resume(service: Service, request: Request) -> Response:
    """POST /resume."""
    await service.lifecycle.resume()
    return json_response({"status": "resumed"})


async def is_paused(service: Service, request: Request) -> Response:
    """GET /is_paused."""
    return json_response({"is_paused": service.gate.is_paused})


async def sleep(service: Service, request: Request) -> Response:
    """POST /sleep."""
    level = request.query_params.get("level", "1")
    if level not in ("0", "1", "2"):
        raise bad_request(f"level={level[:20]!r}", hint="0, 1 or 2", param="level")
    await service.lifecycle.pause(_mode(request))
    service.lifecycle.is_sleeping = True
    return json_response({"status": "sleeping", "level": int(level), "memory_freed": False})


async def wake_up(service: Service, request: Request) -> Response:
    """POST /wake_up."""
    await service.lifecycle.resume()
    return json_response({"status": "awake", "tags": request.query_params.getlist("tags") or None})


async def is_sleeping(service: Service, request: Request) -> Response:
    """GET /is_sleeping."""
    return json_response({"is_sleeping": service.lifecycle.is_sleeping})


async def abort_requests(service: Service, request: Request) -> Response:
    """POST /abort_requests of vLLM: cancel the requests with these ids, or everything in flight."""
    names = (await service.read(request, AbortRequests)).request_ids
    return json_response(
        {"status": "aborted", "aborted": service.cancel_named(names) if names else service.cancel_all()}
    )


async def abort_request(service: Service, request: Request) -> Response:
    """POST /abort_request of SGLang: cancel the request with this id, or everything if `abort_all` says so."""
    asked = await service.read(request, AbortRequest)
    if not asked.rid and not asked.abort_all:
        raise bad_request("no request is named", hint='{"rid": ID} or {"abort_all": true}', param="rid")
    num = service.cancel_all() if asked.abort_all else service.cancel_named([asked.rid or ""])
    return json_response({"status": "aborted", "aborted": num})


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """POST /reset_prefix_cache. KV of older weights is never used; TRL's trainers end a weight update with this."""
    await service.named_params.settle()
    return json_response({"success": True, "message": "Request received, resetting prefix cache status: True"})


def _mode(request: Request) -> str:
    mode = request.query_params.get("mode", "abort")
    if mode not in MODES:
        raise bad_request(f"mode={mode[:20]!r}", hint=f"one of {', '.join(MODES)}", param="mode")
    return mode
