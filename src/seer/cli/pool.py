# SPDX-License-Identifier: Apache-2.0
"""`seer pool up|status|down`: a KV pool that outlives the runs that use it.

A run that starts its own local pool needs none of this. Use it to keep a pool warm between runs, to run
Mooncake's processes, and to see or remove what dead runs left in shared memory.
"""

from __future__ import annotations

import argparse
import sys

import msgspec
from rich.console import Console
from rich.table import Table

from seer.cli.size_option import size_option
from seer.errors import PoolError, SeerError
from seer.kvpool import supervise
from seer.kvpool.base import PoolStats
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import FoundPool, PoolFiles, find_pools, reclaim_stale, remove_files, remove_if_stale
from seer.kvpool.mooncake_metrics import read_tiers
from seer.kvpool.serve import ServeSpec, ServeState
from seer.machine.memory import refuse_beyond_memory
from seer.machine.sizes import show_size

_METRICS_TIMEOUT_S = 2.0


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """One pool as `status --json` prints it."""

    name: str
    backend: str
    run: str = ""
    live_pids: list[int] = []
    stale: bool = False
    problem: str = ""
    addresses: dict[str, str] = {}
    warnings: list[str] = []
    stats: PoolStats | None = None


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb and its three actions."""
    parser = subparsers.add_parser("pool", help="start, list and stop KV pools that outlive a run")
    actions = parser.add_subparsers(dest="action", required=True)

    up = actions.add_parser(
        "up",
        help="start a pool and leave it running",
        description="Start a KV pool and return when it is usable. It stays up until `seer pool down`.",
        epilog="examples:\n  seer pool up --dram 8GiB\n  seer pool up --backend mooncake --dram 64GiB --name train",
    )
    up.add_argument("--backend", choices=["local", "mooncake"], default="local", help="kind of pool (%(default)s)")
    up.add_argument("--dram", metavar="SIZE", type=size_option, required=True, help="size of the DRAM tier, e.g. 8GiB")
    up.add_argument("--ssd", metavar="SIZE", type=size_option, default=0, help="size of the SSD tier (none)")
    up.add_argument("--ssd-dir", metavar="DIR", default="", help="folder of the SSD tier; must exist")
    up.add_argument(
        "--block", metavar="SIZE", type=size_option, default=1 << 20, help="largest KV block of a local pool (1MiB)"
    )
    up.add_argument(
        "--run", metavar="NAME", dest="run_name", default="", help="run that the pool belongs to (the pool's name)"
    )
    up.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address on which Mooncake's master listens (%(default)s)",
    )
    up.set_defaults(run=run_up)

    status = actions.add_parser(
        "status",
        help="list pools, also those of dead runs",
        description="List every pool of this user, what it holds and which processes use it.",
        epilog="examples:\n  seer pool status\n  seer pool status --json",
    )
    status.set_defaults(run=run_status)

    down = actions.add_parser(
        "down",
        help="stop a pool and remove its files",
        description="Stop a pool and remove its files; with --stale, every pool that no process uses.",
        epilog="examples:\n  seer pool down\n  seer pool down --stale",
    )
    down.add_argument("--stale", action="store_true", help="remove every pool that no process uses")
    down.set_defaults(run=run_down)

    status.add_argument("--name", metavar="NAME", help="show this pool alone (all)")
    for action in (up, down):
        action.add_argument("--name", metavar="NAME", default="default", help="name of the pool (%(default)s)")
    for action in (up, status, down):
        action.add_argument("--dram-dir", default="/dev/shm", help=argparse.SUPPRESS)
        action.add_argument("--json", action="store_true", help="one JSON object per line on stdout")


def run_up(args: argparse.Namespace) -> int:
    """Start a pool; returns when it is usable."""
    refuse_beyond_memory(args.dram, "a pool", "--dram")
    spec = ServeSpec(
        backend=args.backend,
        name=args.name,
        dram_dir=args.dram_dir,
        dram_bytes=args.dram,
        ssd_bytes=args.ssd,
        ssd_dir=args.ssd_dir,
        block_bytes=args.block,
        run=args.run_name,
        host=args.host,
    )
    state = supervise.start(spec)
    if args.json:
        print(msgspec.json.encode(state).decode())
    else:
        where = "".join(f", {name} {address}" for name, address in state.addresses.items())
        print(f"pool {state.name!r} is up ({state.backend}, process {state.pid}{where})")
    for warning in state.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def run_status(args: argparse.Namespace) -> int:
    """List every pool of this user."""
    reports = pool_reports(args.dram_dir)
    if args.name is not None:
        reports = [report for report in reports if report.name == args.name]
        if not reports:
            raise PoolError(f"there is no pool named {args.name!r}", hint="see `seer pool status`")
    if args.json:
        for report in reports:
            print(msgspec.json.encode(report).decode())
        return 0
    if not reports:
        print(f"no pool in {args.dram_dir}")
        return 0
    table = Table(
        "pool",
        "backend",
        "used by",
        "blocks",
        "DRAM",
        "SSD",
        "hits",
        "misses",
        "spilled",
        "corrupt",
        "failed",
    )
    for report in reports:
        table.add_row(*_row(report))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)
    for report in reports:
        for warning in report.warnings:
            print(f"warning: {report.name}: {warning}", file=sys.stderr)
    return 0


def run_down(args: argparse.Namespace) -> int:
    """Stop a pool, or remove what dead runs left."""
    if args.stale:
        gone = reclaim_stale(args.dram_dir, least_age_s=0.0)
    else:
        _stop_and_remove(args.name, args.dram_dir)
        gone = [args.name]
    if args.json:
        print(msgspec.json.encode({"removed": gone}).decode())
    else:
        print("\n".join(f"pool {name!r} is gone" for name in gone) or "nothing to remove")
    return 0


def _stop_and_remove(name: str, dram_dir: str) -> None:
    files = PoolFiles.find(name, dram_dir)
    state = supervise.find_state(name, dram_dir)
    found = [pool for pool in find_pools(dram_dir) if pool.name == name]
    if state is not None:
        supervise.stop(state, dram_dir)
    elif found and not found[0].stale:
        raise PoolError(
            f"pool {name!r} was opened by a run (processes {found[0].live_pids})",
            hint="end the run; what it leaves behind `seer pool down --stale` removes",
        )
    if files is not None:
        remove_if_stale(files) if state is None else remove_files(files)
    if state is None and not found:
        raise PoolError(f"there is no pool named {name!r}", hint="see `seer pool status`")


def pool_reports(dram_dir: str) -> list[PoolReport]:
    """Every pool of this user: arenas found in memory, and Mooncake stores that are up."""
    states = {state.name: state for state in supervise.find_states(dram_dir)}
    reports = [_local_report(found, dram_dir) for found in find_pools(dram_dir)]
    reports += [_mooncake_report(state) for state in states.values() if state.backend == "mooncake"]
    return reports


def _local_report(found: FoundPool, dram_dir: str) -> PoolReport:
    stats, problem = None, found.problem
    if not problem:
        try:
            with LocalPool.attach(found.name, dram_dir, keeper=False, populate=False) as pool:
                stats = pool.stats()
        except SeerError as error:  # its SSD file is gone, for example: the other pools are listed all the same
            problem = str(error)
    return PoolReport(
        name=found.name,
        backend="local",
        run=found.run,
        live_pids=found.live_pids,
        stale=found.stale,
        problem=problem,
        stats=stats,
    )


def _mooncake_report(state: ServeState) -> PoolReport:
    tiers = read_tiers(state.addresses["metrics"], _METRICS_TIMEOUT_S)
    return PoolReport(
        name=state.name,
        backend=state.backend,
        live_pids=[state.pid, *state.pids.values()],
        addresses=state.addresses,
        warnings=state.warnings,
        problem="" if tiers is not None else "its master does not answer",
        stats=PoolStats(backend=state.backend, **msgspec.structs.asdict(tiers)) if tiers is not None else None,
    )


def _row(report: PoolReport) -> list[str]:
    used_by = report.problem or ("no process (stale)" if report.stale else ", ".join(map(str, report.live_pids)))
    stats = report.stats
    if stats is None:
        return [report.name, report.backend, used_by, *["-"] * 8]
    return [
        report.name,
        report.backend,
        used_by,
        str(stats.num_blocks),
        f"{show_size(stats.dram_bytes)} of {show_size(stats.dram_capacity_bytes)}",
        f"{show_size(stats.ssd_bytes)} of {show_size(stats.ssd_capacity_bytes)}",
        str(stats.num_hit_dram + stats.num_hit_ssd),
        str(stats.num_miss),
        str(stats.num_spilled),
        str(stats.num_corrupt),
        str(stats.num_failed),
    ]
