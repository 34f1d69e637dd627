# SPDX-License-Identifier: Apache-2.0
"""`--watch` and `--metrics-port` of `seer rollout`: a look at the run while it runs, on loopback."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from seer.cli.number_option import NumberOption
from seer.errors import MissingExtra
from seer.metrics.events import EventSink, discard
from seer.ranges import Port

if TYPE_CHECKING:
    from seer.api import Rollout

WATCH_PORT = 8001


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    """Add both."""
    watch = f"serve the live page on this port of 127.0.0.1 ({WATCH_PORT})"
    parser.add_argument("--watch", type=NumberOption(Port), nargs="?", const=WATCH_PORT, metavar="PORT", help=watch)
    metrics = "serve /metrics for Prometheus on this port of 127.0.0.1 (none)"
    parser.add_argument("--metrics-port", type=NumberOption(Port), metavar="PORT", help=metrics)


def refuse_missing_packages(args: argparse.Namespace) -> None:
    """Before anything starts: both need a web server."""
    for package in ("fastapi", "uvicorn", "httptools"):
        if (args.watch is not None or args.metrics_port is not None) and importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "serve")


@contextlib.asynccontextmanager
async def watching(rollout: Rollout, args: argparse.Namespace) -> AsyncIterator[EventSink]:
    """Serve what was asked for; gives the sink that the run's events go to."""
    if args.watch is None and args.metrics_port is None:
        yield discard
        return
    from seer.metrics.live_counts import LiveCounts
    from seer.runs.fleet_sample import fleet_sample
    from seer.serve.live import LivePage
    from seer.serve.watch import watched

    live = LivePage(LiveCounts(), lambda: fleet_sample(rollout.fleet), f"seer rollout: {rollout.config.model}")
    async with contextlib.AsyncExitStack() as stack:
        for port in dict.fromkeys(port for port in (args.watch, args.metrics_port) if port is not None):
            url = await stack.enter_async_context(watched(live, lambda: fleet_sample(rollout.fleet), port))
            sys.stderr.write(f"live page {url}/, metrics {url}/metrics\n")
        yield live.on_event
