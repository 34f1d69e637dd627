# SPDX-License-Identifier: Apache-2.0
"""`--watch` and `--metrics-port` of `seer rollout`: a look at the run while it runs, on loopback."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING

from seer.cli.number_option import NumberOption
from seer.errors import MissingExtra
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


async def serve_watched(rollout: Rollout, args: argparse.Namespace) -> None:
    """Serve what was asked for, until the rollout ends."""
    for port in dict.fromkeys(port for port in (args.watch, args.metrics_port) if port is not None):
        url = await rollout.serve_metrics(port)
        sys.stderr.write(f"live page {url}/, metrics {url}/metrics\n")
