"""`seer simulate`: one workload under several schedulers, in virtual time, as a table, JSON and plots.

The rollout loop and the schedulers are the production code; instances are cost models. What is printed is
computed from the run's events alone. The oracle (true lengths, no speculation) is always run as well:
`oracle_share` is a scheduler's throughput as a share of the oracle's on the same lengths.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from seer.errors import ConfigError
from seer.metrics.events import EventSink
from seer.report.simulation_folder import SimulationFolder
from seer.scheduling.registry import NAMES as SCHEDULER_NAMES
from seer.scheduling.registry import parse_scheduler
from seer.sim.catalog import NAMES as WORKLOAD_NAMES
from seer.sim.catalog import WorkloadOptions, load_workload
from seer.sim.cluster import SimulationResult, simulate
from seer.sim.costs import GPUS, MODELS
from seer.sim.replay import run_metadata
from seer.sim.workloads import Workload

DEFAULT_SCHEDULERS = "verl-sync,verl,divided,context,seer"
ORACLE = "oracle"

EXAMPLES = f"""\
workloads:
  {", ".join(WORKLOAD_NAMES)}
schedulers:
  {", ".join(SCHEDULER_NAMES)}; +sd after a name adds plain speculation (verl-sync+sd)

examples:
  seer simulate qwen2-vl-72b
  seer simulate moonlight --schedulers verl-sync,verl-sync+sd,seer --group-size 16
  seer simulate trace:lengths.json --model llama-8b --gpu h200 --instances 4
  seer simulate synthetic --groups 200 --mean 3000 --max 32768 --correlation 0.9 --out runs/long-tail

The same seed gives the same JSON, byte for byte, but for `simulator_wall_s`, the real seconds the
simulation took; --no-timing leaves that out (null), so that two outputs can be compared as files.
"""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "simulate",
        help="run a workload under several schedulers in virtual time",
        description="Run one workload under several schedulers in virtual time: the production rollout loop\n"
        "and schedulers over instances that are cost models. Seconds for a cluster's hour.",
        epilog=EXAMPLES,
    )
    parser.add_argument("workload", metavar="WORKLOAD", help="what is rolled out; see below")
    parser.add_argument(
        "--schedulers", default=DEFAULT_SCHEDULERS, metavar="A,B,...", help="compared to the first (%(default)s)"
    )
    parser.add_argument(
        "--speculation",
        choices=("auto", "off"),
        default="auto",
        help="auto: as each scheduler does; off: none drafts (%(default)s)",
    )
    parser.add_argument("--group-size", type=int, metavar="G", help="responses per prompt")
    parser.add_argument("--instances", type=int, metavar="N", help="inference engines")
    parser.add_argument(
        "--chunk-tokens", type=int, metavar="T", help="tokens a request may run before it is placed anew"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="draws the lengths (%(default)s)")
    _add_output_options(parser)
    _add_cluster_options(parser)
    _add_shape_options(parser)
    parser.set_defaults(run=run)


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of the table")
    parser.add_argument(
        "--no-timing", action="store_true", help="simulator_wall_s is null: output repeats byte for byte"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write results.json, and per scheduler its events, a trace and plots",
    )


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    cluster = parser.add_argument_group("for traces and synthetic lengths")
    cluster.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MODELS)} (llama-8b)")
    cluster.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)} (h200)")
    cluster.add_argument("--num-gpus", type=int, metavar="N", help="GPUs per instance (1)")
    cluster.add_argument("--prompt-tokens", type=int, metavar="N", help="length of prompts (as recorded, or 512)")
    cluster.add_argument(
        "--max",
        type=int,
        metavar="N",
        dest="maximum",
        help="longest response allowed (as recorded, or 32768)",
    )


def _add_shape_options(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("for synthetic lengths")
    shape.add_argument("--groups", type=int, metavar="N", help="number of prompts (64)")
    shape.add_argument("--mean", type=int, metavar="N", help="mean length (4000)")
    shape.add_argument(
        "--sigma", "--shape", type=float, metavar="X", help="spread of the log of lengths (1.0); 0: all equal"
    )
    shape.add_argument("--correlation", type=float, metavar="X", help="share of the spread common to a group (0.7)")


def run(args: argparse.Namespace) -> int:
    """Simulate each scheduler, then print and write what came of it."""
    schedulers = _schedulers(args.schedulers)
    workload = load_workload(
        args.workload,
        WorkloadOptions(
            seed=args.seed,
            group_size=args.group_size,
            instances=args.instances,
            chunk_tokens=args.chunk_tokens,
            model=args.model,
            gpu=args.gpu,
            num_gpus=args.num_gpus,
            prompt_tokens=args.prompt_tokens,
            maximum=args.maximum,
            mean=args.mean,
            sigma=args.sigma,
            correlation=args.correlation,
            groups=args.groups,
        ),
    )
    folder = None
    if args.out is not None:
        folder = SimulationFolder(args.out, workload.name, workload.num_instances, workload.limits().kv_tokens)
    rows = _simulate_all(workload, schedulers, args, folder)
    if folder is not None:
        folder.write_results(_encode(rows))
    if args.json:
        sys.stdout.buffer.write(_encode(rows))
        sys.stdout.flush()
    else:
        print_table(Console(width=None if sys.stdout.isatty() else 150), workload, args.seed, rows)
        if args.out is not None:
            sys.stdout.write(f"events, traces and plots are in {args.out}\n")
    return 0


@dataclass(frozen=True, slots=True)
class Row:
    """One scheduler's result, in the order and with the names that `--json` prints."""

    workload: str
    scheduler: str
    group_size: int
    seed: int
    throughput_tokens_s: float
    makespan_s: float
    tail_s: float
    preemptions: int
    recomputed_tokens: int
    migrations: int
    migrated_tokens: int
    idle_share: float
    oracle_share: float
    mean_accepted: float
    simulator_wall_s: float | None
    off_policy: bool
    num_requests: int
    num_tokens: int
    cancelled_tokens: int
    max_tokens: int
    prompt_tokens: int
    chunk_tokens: int
    model: str
    gpu: str
    gpus_per_instance: int
    instances: int
    speculation: str


def make_row(
    workload: Workload,
    result: SimulationResult,
    oracle_tokens_s: float,
    *,
    seed: int,
    speculation: str,
    timing: bool,
) -> Row:
    """What one simulation came to. Floats are rounded: more digits would claim more than a model can know."""
    summary = result.summary
    return Row(
        workload=workload.name,
        scheduler=result.scheduler,
        group_size=workload.group_size,
        seed=seed,
        throughput_tokens_s=round(summary.throughput_tokens_s, 3),
        makespan_s=round(summary.makespan_s, 6),
        tail_s=round(summary.tail_s, 6),
        preemptions=summary.preemptions,
        recomputed_tokens=summary.recomputed_tokens,
        migrations=summary.migrations,
        migrated_tokens=summary.migrated_tokens,
        idle_share=round(summary.idle_share, 6),
        oracle_share=round(summary.throughput_tokens_s / oracle_tokens_s, 6),
        mean_accepted=round(summary.mean_accepted, 6),
        simulator_wall_s=round(result.wall_s, 3) if timing else None,
        off_policy=result.off_policy,
        num_requests=summary.num_requests,
        num_tokens=summary.num_tokens,
        cancelled_tokens=summary.cancelled_tokens,
        max_tokens=workload.max_tokens,
        prompt_tokens=workload.prompt_tokens,
        chunk_tokens=workload.chunk_tokens,
        model=workload.cost.model.name,
        gpu=workload.cost.gpu.name,
        gpus_per_instance=workload.cost.num_gpus,
        instances=workload.num_instances,
        speculation=speculation,
    )


def _schedulers(names: str) -> list[str]:
    schedulers = [name.strip() for name in names.split(",") if name.strip()]
    if not schedulers:
        raise ConfigError("no scheduler was named", hint=f"--schedulers {DEFAULT_SCHEDULERS}")
    for number, name in enumerate(schedulers):
        parse_scheduler(name)
        if name in schedulers[:number]:
            raise ConfigError(f"scheduler {name} is named twice", hint="name each once")
    return schedulers


def _simulate_all(
    workload: Workload, schedulers: list[str], args: argparse.Namespace, folder: SimulationFolder | None
) -> list[Row]:
    todo = schedulers if ORACLE in schedulers else [*schedulers, ORACLE]
    results: dict[str, SimulationResult] = {}
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        for scheduler in todo:
            bar = bars.add_task(scheduler, total=len(workload.lengths))
            recorder: contextlib.AbstractContextManager[EventSink | None] = contextlib.nullcontext(None)
            if folder is not None and scheduler in schedulers:
                metadata = run_metadata(workload, scheduler, args.speculation, args.seed)
                recorder = folder.recorder(scheduler, metadata)
            with recorder as events:
                results[scheduler] = simulate(
                    workload,
                    scheduler,
                    speculation=args.speculation,
                    events=events,
                    progress=lambda done, total, bar=bar: bars.update(bar, completed=done),  # type: ignore[misc]
                )
    oracle_tokens_s = results[ORACLE].summary.throughput_tokens_s
    return [
        make_row(
            workload,
            results[scheduler],
            oracle_tokens_s,
            seed=args.seed,
            speculation=args.speculation,
            timing=not args.no_timing,
        )
        for scheduler in schedulers
    ]


def _encode(rows: list[Row]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n"


def describe(workload: Workload, seed: int) -> str:
    """The workload and its cluster in one line."""
    cost = workload.cost
    return (
        f"{workload.name}: {len(workload.lengths):,} groups of {workload.group_size}, "
        f"{workload.num_requests:,} responses, mean {workload.num_tokens / workload.num_requests:,.0f}, "
        f"longest {max(map(max, workload.lengths)):,} of {workload.max_tokens:,} tokens; "
        f"{cost.model.name} on {workload.num_instances} instances of {cost.num_gpus} x {cost.gpu.name}; "
        f"seed {seed}"
    )


def print_table(console: Console, workload: Workload, seed: int, rows: list[Row]) -> None:
    """One line per scheduler; ratios are to the first."""
    first = rows[0]
    console.print(describe(workload, seed), highlight=False, soft_wrap=True)
    table = Table(caption=f"x: throughput relative to {first.scheduler}; of oracle: without speculation, same lengths")
    table.add_column("scheduler")
    columns = "tokens/s,x,of oracle,total s,tail s,preempted,recomputed,migrations,idle,accepted,simulated in"
    for column in columns.split(","):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.scheduler} (off-policy)" if row.off_policy else row.scheduler,
            f"{row.throughput_tokens_s:,.0f}",
            f"{row.throughput_tokens_s / first.throughput_tokens_s:.2f}",
            f"{row.oracle_share:.1%}",
            f"{row.makespan_s:,.1f}",
            f"{row.tail_s:,.1f}",
            f"{row.preemptions:,}",
            f"{row.recomputed_tokens:,}",
            f"{row.migrations:,}",
            f"{row.idle_share:.1%}",
            f"{row.mean_accepted:.2f}",
            "-" if row.simulator_wall_s is None else f"{row.simulator_wall_s:.1f} s",
        )
    console.print(table)
