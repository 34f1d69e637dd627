# SPDX-License-Identifier: Apache-2.0
"""GET /, GET /live/events and GET /metrics of a server."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from seer.metrics.fleet_sample import FleetSample
from seer.serve.service import Service
from seer.serve.watch import metrics_of


async def live_page(service: Service, request: Request) -> Response:
    """The page."""
    return service.backend.live.page()


async def live_events(service: Service, request: Request) -> Response:
    """Its states."""
    return service.backend.live.events()


async def metrics(service: Service, request: Request) -> Response:
    """The text that Prometheus scrapes."""

    def sample() -> FleetSample:
        return replace(service.backend.sample(), refused=service.num_refused)

    return metrics_of(request, service.backend.live, sample)
