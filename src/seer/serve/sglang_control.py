# SPDX-License-Identifier: Apache-2.0
"""SGLang's control endpoints as slime calls them, of the router and of its one engine: both are this server.

slime starts by asking the engine for /server_info and registering it with the router (POST /workers). To update weights
it calls /pause_generation, /flush_cache, /update_weights_from_disk and /continue_generation; at the end of a rollout
step GET /workers, /abort_request, and /v1/loads until nothing is left.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from seer.serve.refusals import bad_request, json_response
from seer.serve.service import Service

_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep"}
"""SGLang's names of pauses. Both that keep requests are one here: KV is never used under other weights."""


class PauseGeneration(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /pause_generation, which may be empty."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGeneration(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /continue_generation, which may be empty."""

    torch_empty_cache: Any = None


class Worker(msgspec.Struct, kw_only=True):
    """Body of POST /workers; fields of other kinds of workers are not looked at."""

    url: str
    worker_type: str = "regular"


async def workers(service: Service, request: Request) -> Response:
    """GET /workers: the router's list of engines is this server alone."""
    url = _own_url(request)
    return json_response({"workers": [{"id": url, "url": url, "worker_type": "regular", "is_healthy": True}]})


async def add_worker(service: Service, request: Request) -> Response:
    """POST /workers: this server alone, since it would not send requests to another."""
    asked, own = await service.read(request, Worker), _own_url(request)
    if asked.url.rstrip("/") != own or asked.worker_type != "regular":
        raise bad_request(
            f"a worker of type {asked.worker_type[:40]!r} at {asked.url[:200]!r}: this server has its own instances",
            hint=f"the one worker is {own}: --rollout-external-engine-addrs is the address of --sglang-router-ip",
            param="url",
        )
    return json_response({"status": "accepted", "worker_id": own, "url": own})


async def loads(service: Service, request: Request) -> Response:
    """GET /v1/loads: how much there is to do."""
    return json_response({"loads": [{"dp_rank": 0, "num_total_reqs": service.gate.num_in_flight}]})


async def pause_generation(service: Service, request: Request) -> Response:
    """POST /pause_generation."""
    asked = await service.read(request, PauseGeneration)
    await service.lifecycle.pause(_MODES[asked.mode])
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(service: Service, request: Request) -> Response:
    """POST /continue_generation."""
    await service.read(request, ContinueGeneration)
    await service.lifecycle.resume()
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


def _own_url(request: Request) -> str:
    """As the client calls this server."""
    return f"{request.url.scheme}://{request.url.netloc}"
