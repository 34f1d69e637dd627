# SPDX-License-Identifier: Apache-2.0
"""`seer doctor --ray`: a table of the nodes of a Ray cluster."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import msgspec

from seer.machine.sizes import show_size

if TYPE_CHECKING:
    from seer.hosting.ray.checkup import NodeReport
    from seer.hosting.ray.node_facts import Reached


def run(address: str, *, as_json: bool) -> int:
    """Look at every node; fails when instances could not run on one of them."""
    from seer.hosting.ray.checkup import look_at_nodes

    reports = asyncio.run(look_at_nodes(address))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(reports)).decode() + "\n")
    else:
        _print(reports)
    return 1 if any(report.troubles for report in reports) else 0


def _print(reports: list[NodeReport]) -> None:
    from rich.table import Table

    from seer.cli.wide_console import wide_console

    table = Table(
        *("node", "Ray's resources", "Seer, Python", "free memory", "free /dev/shm", "clock"),
        *("reads from here", "from the next", "state"),
    )
    for report in reports:
        table.add_row(report.address, _resources(report), *_answers(report), "; ".join(report.troubles) or "ok")
    wide_console(200, soft_wrap=True).print(table)


def _resources(report: NodeReport) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(report.resources.items())) or "none"


def _answers(report: NodeReport) -> list[str]:
    facts, clock, reached = report.facts, report.clock, report.reached
    if facts is None or clock is None or reached is None:
        return ["-"] * 6
    return [
        f"{facts.seer}, {facts.python}",
        show_size(facts.free_memory_bytes),
        show_size(facts.free_shared_memory_bytes),
        f"{clock.offset_s:+.3f} s ± {clock.uncertainty_s * 1e3:.1f} ms",
        _rate(reached),
        _rate(report.reached_next),
    ]


def _rate(reached: Reached | None) -> str:
    rate = reached.bandwidth_bytes_s if reached is not None else None
    return "-" if rate is None else f"{show_size(int(rate))}/s"
