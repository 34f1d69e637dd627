# SPDX-License-Identifier: Apache-2.0
"""`seer simulate WORKLOAD --iterations N`: whole iterations of a workload of the paper, one after the other.

Each is a rollout, training and the weight update; length hints are carried over (`seer.sim.iterations`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

import msgspec
from rich.table import Table

from seer.cli.wide_console import wide_console
from seer.errors import ConfigError
from seer.sim.iterations import Iteration, iterate
from seer.sim.workloads import PAPER

_OTHERS = ("group_size", "instances", "chunk_tokens", "out")
"""Options that do not apply to iterations. A workload of the paper refuses those of traces and synthetic lengths."""


def run_iterations(args: argparse.Namespace, schedulers: Sequence[str], seeds: Sequence[int]) -> int:
    """Simulate every scheduler's iterations, and print them."""
    check_options(args, seeds)
    done = {
        scheduler: list(
            iterate(
                args.workload,
                scheduler,
                seed=seeds[0],
                num_iterations=args.iterations,
                speculation=args.speculation,
            )
        )
        for scheduler in schedulers
    }
    if args.json:
        rows = [
            {"workload": args.workload, "scheduler": scheduler, "iteration": number, **asdict(one)}
            for scheduler, iterations in done.items()
            for number, one in enumerate(iterations)
        ]
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")
    else:
        print_iterations(args.workload, done)
    return 0


def check_options(args: argparse.Namespace, seeds: Sequence[int]) -> None:
    """Refuse what has no meaning with iterations."""
    if args.workload not in PAPER:
        raise ConfigError(f"--iterations with {args.workload}", hint=f"name one of {', '.join(PAPER)}")
    if len(seeds) > 1:
        raise ConfigError(f"--iterations with {len(seeds)} seeds", hint="name one seed: --seeds 0")
    for option in _OTHERS:
        if getattr(args, option) is not None:
            raise ConfigError(f"--iterations with --{option.replace('_', '-')}", hint="leave it out")


def print_iterations(workload: str, done: dict[str, list[Iteration]]) -> None:
    """One line per scheduler; ratios are to the first."""
    table = Table(caption="x: time of the first scheduler over its own; seconds are of the first and the last rollout")
    for column in ("scheduler", "rollout x", "iteration x", "rollout share", "tail share", "first s", "last s"):
        table.add_column(column, justify="left" if column == "scheduler" else "right")
    base = _totals(next(iter(done.values())))
    for scheduler, iterations in done.items():
        rollout_s, total_s, tail_s = _totals(iterations)
        table.add_row(
            scheduler,
            f"{base[0] / rollout_s:.2f}",
            f"{base[1] / total_s:.2f}",
            f"{rollout_s / total_s:.0%}",
            f"{tail_s / rollout_s:.0%}",
            f"{iterations[0].rollout_s:,.0f}",
            f"{iterations[-1].rollout_s:,.0f}",
        )
    console = wide_console(170)
    num = len(next(iter(done.values())))
    console.print(f"{workload}: {num} iterations, length hints carried over", highlight=False)
    console.print(table)


def _totals(iterations: Sequence[Iteration]) -> tuple[float, float, float]:
    """Seconds of the rollouts, of all phases, and of the tails."""
    return (
        sum(one.rollout_s for one in iterations),
        sum(one.total_s for one in iterations),
        sum(one.tail_s for one in iterations),
    )
