# SPDX-License-Identifier: Apache-2.0
"""What `Rollout.serve_metrics` serves: the numbers and the live page of a rollout in the process that runs it."""

from __future__ import annotations

import contextlib

from seer.hosting.fleet import HostedFleet
from seer.metrics.events import Event
from seer.metrics.fleet_sample import FleetSample
from seer.metrics.live_counts import LiveCounts
from seer.runs.fleet_sample import fleet_sample
from seer.serve.live import LivePage
from seer.serve.watch import watched


class WatchedRollout:
    """An event sink, and the servers that show what it has seen."""

    def __init__(self, fleet: HostedFleet, title: str) -> None:
        self._fleet = fleet
        self._live = LivePage(LiveCounts(), self._sample, title)
        self._servers = contextlib.AsyncExitStack()

    def __call__(self, event: Event) -> None:
        """Take an event into account."""
        self._live.on_event(event)

    async def serve(self, port: int) -> str:
        """Serve on a port of 127.0.0.1 until `close`; returns the URL."""
        return await self._servers.enter_async_context(watched(self._live, self._sample, port))

    async def close(self) -> None:
        """End the servers."""
        self._live.close()
        await self._servers.aclose()

    def _sample(self) -> FleetSample:
        return fleet_sample(self._fleet)
