# SPDX-License-Identifier: Apache-2.0
"""Looking at a fleet over HTTP: the live page at `/`, and `/metrics`; of a server, or beside `seer rollout`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from seer.errors import MissingExtra
from seer.metrics.fleet_sample import FleetSample
from seer.serve.keys import Keys
from seer.serve.live import LivePage
from seer.serve.refusals import Refusal, bad_request, error_response
from seer.serve.settings import ServeSettings
from seer.serve.uvicorn_server import QuietServer, bind, url_of

Work = Callable[[Request], Awaitable[Response]]


def metrics_of(request: Request, live: LivePage, sample: Callable[[], FleetSample]) -> Response:
    """The text that Prometheus scrapes; `?names=underscore` for names without a colon."""
    names = request.query_params.get("names", "colon")
    if names not in ("colon", "underscore"):
        raise bad_request(f"names={names[:20]!r}", hint="colon or underscore", param="names")
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        from seer.metrics.prometheus import make_registry
    except ModuleNotFoundError:
        raise MissingExtra("prometheus-client", "serve") from None
    registry = make_registry(live.counts, sample, "colon" if names == "colon" else "underscore")
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


@contextlib.asynccontextmanager
async def watched(live: LivePage, sample: Callable[[], FleetSample], port: int) -> AsyncIterator[str]:
    """Serve the page and the metrics of a rollout on loopback; gives their URL."""
    settings = ServeSettings(port=port)
    listener = bind(settings)
    server = QuietServer(_app(live, sample), settings.limits)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await server.listens.wait()
        yield url_of(listener)
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


def _app(live: LivePage, sample: Callable[[], FleetSample]) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def page(request: Request) -> Response:
        return live.page()

    async def events(request: Request) -> Response:
        return live.events()

    async def metrics(request: Request) -> Response:
        return metrics_of(request, live, sample)

    for path, work in {"/": page, "/live/events": events, "/metrics": metrics}.items():
        app.add_route(path, _from_this_machine(work), methods=["GET"])
    return app


def _from_this_machine(work: Work) -> Work:
    """Without keys: refuse pages of other sites."""

    async def endpoint(request: Request) -> Response:
        try:
            Keys().check(request.headers, is_admin=False)
            return await work(request)
        except Refusal as refusal:
            return error_response(refusal)

    return endpoint
