# SPDX-License-Identifier: Apache-2.0
"""The routes of a server.

Bodies are decoded by msgspec, not by FastAPI: a batch of token ids is read once, at msgspec's speed, and a field has
its range from `seer.ranges` like every other number that Seer takes.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from seer.serve.backend import Backend
from seer.serve.chat import chat_completions
from seer.serve.collective_rpc import collective_rpc
from seer.serve.completions import completions
from seer.serve.endpoint import Work, guarded
from seer.serve.gate import Gate
from seer.serve.groups import GroupNames
from seer.serve.lifecycle_endpoints import (
    abort_request,
    abort_requests,
    is_paused,
    is_sleeping,
    pause,
    reset_prefix_cache,
    resume,
    sleep,
    wake_up,
)
from seer.serve.model_endpoints import detokenize, finish_session, health, model, models, tokenize, version
from seer.serve.refusals import Refusal, error_response
from seer.serve.service import Service
from seer.serve.settings import ServeSettings
from seer.serve.sglang import sglang_generate
from seer.serve.sglang_control import add_worker, continue_generation, loads, pause_generation, workers
from seer.serve.token_generate import token_generate
from seer.serve.trl_generate import trl_chat, trl_generate
from seer.serve.trl_weights import (
    close_communicator,
    get_tensor_parallel_size,
    init_communicator,
    update_named_param,
)
from seer.serve.watch_endpoints import live_events, live_page, metrics
from seer.serve.weight_endpoints import (
    close_group,
    finish_update,
    get_world_size,
    init_group,
    server_info,
    start_update,
    update_weights,
    weight_info,
)

OPEN: dict[str, Work] = {
    "GET /health": health,
    "GET /health/": health,
    "GET /liveness": health,
    "GET /ping": health,
    "GET /health_generate": health,
}
"""Without a key, for load balancers; they say nothing of the model."""

GENERATION: dict[str, Work] = {
    "GET /v1/models": models,
    "GET /v1/models/{name:path}": model,
    "GET /version": version,
    "GET /": live_page,
    "GET /live/events": live_events,
    "GET /metrics": metrics,
    "POST /v1/completions": completions,
    "POST /v1/chat/completions": chat_completions,
    "POST /inference/v1/generate": token_generate,
    "POST /generate": sglang_generate,
    "POST /generate/": trl_generate,
    "POST /chat/": trl_chat,
    "GET /workers": workers,
    "GET /v1/loads": loads,
    "POST /tokenize": tokenize,
    "POST /detokenize": detokenize,
    "POST /finish_session": finish_session,
}

ADMIN: dict[str, Work] = {
    "POST /pause": pause,
    "POST /resume": resume,
    "GET /is_paused": is_paused,
    "POST /sleep": sleep,
    "POST /wake_up": wake_up,
    "GET /is_sleeping": is_sleeping,
    "POST /abort_requests": abort_requests,
    "POST /abort_request": abort_request,
    "POST /reset_prefix_cache": reset_prefix_cache,
    "POST /reset_prefix_cache/": reset_prefix_cache,
    "POST /flush_cache": reset_prefix_cache,
    "GET /flush_cache": reset_prefix_cache,
    "POST /pause_generation": pause_generation,
    "POST /continue_generation": continue_generation,
    "POST /workers": add_worker,
    "GET /server_info": server_info,
    "GET /get_world_size": get_world_size,
    "GET /get_world_size/": get_world_size,
    "GET /get_tensor_parallel_size/": get_tensor_parallel_size,
    "POST /init_communicator/": init_communicator,
    "POST /update_named_param/": update_named_param,
    "POST /close_communicator/": close_communicator,
    "GET /weight_info": weight_info,
    "GET /get_weight_version": weight_info,
    "POST /init_weight_transfer_engine": init_group,
    "POST /shutdown_weight_transfer_engine": close_group,
    "POST /start_weight_update": start_update,
    "POST /update_weights": update_weights,
    "POST /update_weights_from_disk": update_weights,
    "POST /finish_weight_update": finish_update,
    "POST /collective_rpc": collective_rpc,
}


def make_service(backend: Backend, settings: ServeSettings) -> Service:
    """The state of a server; made inside its event loop."""
    return Service(backend, settings, Gate(settings.limits.max_in_flight), GroupNames())


def make_app(service: Service) -> FastAPI:
    """The application of a service."""
    # No pages of FastAPI's own: they load scripts from the network.
    app = FastAPI(title="seer serve", docs_url=None, redoc_url=None, openapi_url=None)
    for routes, is_admin, is_open in ((OPEN, False, True), (GENERATION, False, False), (ADMIN, True, False)):
        for route, work in routes.items():
            method, path = route.split(" ")
            app.add_route(path, guarded(service, work, is_admin=is_admin, is_open=is_open), methods=[method])
    app.add_exception_handler(HTTPException, _answer)
    return app


async def _answer(request: Request, error: Exception) -> Response:
    """Errors of the router itself: no such path, or another method."""
    assert isinstance(error, HTTPException), "registered for this kind"
    refusal = Refusal(error.status_code, f"{error.detail}: {request.method} {request.url.path[:200]}")
    response = error_response(refusal)
    response.headers.update(error.headers or {})  # which methods there are
    return response
