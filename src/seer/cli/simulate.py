# SPDX-License-Identifier: Apache-2.0
"""`seer simulate`: one workload under several schedulers, in virtual time, as a table, JSON and plots.

The rollout loop and the schedulers are the production code; instances are cost models. What is printed is
computed from the run's events alone. `seer-oracle` (true lengths, Seer's chunks, no speculation) is always run as well:
`oracle_share` is a scheduler's throughput as a share of its throughput on the same lengths.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from seer.cli.number_option import NumberOption
from seer.cli.seeds import parse_seeds
from seer.cli.simulate_iterations import run_iterations
from seer.cli.simulate_table import Row, describe, make_row, print_means, print_table
from seer.cli.wide_console import wide_console
from seer.errors import ConfigError
from seer.metrics.events import EventSink
from seer.ranges import Count, Gigabits, LogSpread, Probability, Responses, Seconds, SimulatedGpus, SimulatedInstances
from seer.report.simulation_folder import SimulationFolder
from seer.scheduling.registry import NAMES as SCHEDULER_NAMES
from seer.scheduling.registry import parse_scheduler
from seer.sim.catalog import AGENTS, WorkloadOptions, load_workload
from seer.sim.catalog import NAMES as WORKLOAD_NAMES
from seer.sim.cluster import SimulationResult, simulate
from seer.sim.costs import GPUS, MODELS
from seer.sim.network import NetworkShape
from seer.sim.replay import run_metadata
from seer.sim.turns import WAYS, WhileWaiting
from seer.sim.workloads import Workload

DEFAULT_SCHEDULERS = "verl-sync,verl,divided,context,seer"
DEFAULT_WAYS = "hold,recompute,park"
ORACLE = "seer-oracle"

EXAMPLES = f"""\
workloads:
  {", ".join(WORKLOAD_NAMES)}
  {", ".join(AGENTS)} have turns: after each, a response waits for its tool
schedulers:
  {", ".join(SCHEDULER_NAMES)}; +sd after a name adds plain speculation (verl-sync+sd)

examples:
  seer simulate qwen2-vl-72b
  seer simulate qwen2-vl-72b --seeds 0..7           means over eight sets of lengths, with their range
  seer simulate moonlight --schedulers verl-sync,verl-sync+sd,seer --group-size 16
  seer simulate moonlight --schedulers verl-sync,seer --iterations 10
  seer simulate moonlight --schedulers seer --nodes 64 --nic-gbps 100
  seer simulate trace:lengths.json --model llama-8b --gpu h200 --instances 4
  seer simulate synthetic --groups 200 --mean 3000 --max 32768 --correlation 0.9 --out runs/long-tail
  seer simulate agent-swe --schedulers verl,seer    agents: KV of waiting requests held, recomputed, parked
  seer simulate agent-tools --tool-s 10 --given-tokens 1000 --while-waiting hold,park

The same seed gives the same JSON, byte for byte, except for `simulator_wall_s`, the real seconds of the
simulation; --no-timing sets it to null, so that two outputs can be compared as files.
"""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "simulate",
        help="run a workload under several schedulers in virtual time",
        description="Run one workload under several schedulers in virtual time: the production rollout loop\n"
        "and schedulers over instances that are cost models. An hour of a cluster takes seconds.",
        epilog=EXAMPLES,
    )
    parser.add_argument("workload", metavar="WORKLOAD", help="lengths and cluster to simulate; listed below")
    parser.add_argument(
        "--schedulers",
        default=DEFAULT_SCHEDULERS,
        metavar="A,B,...",
        help="ratios are to the first (%(default)s)",
    )
    parser.add_argument(
        "--speculation",
        choices=("auto", "off"),
        default="auto",
        help="auto: drafts as each scheduler says; off: no drafts (%(default)s)",
    )
    parser.add_argument("--group-size", type=NumberOption(Responses), metavar="G", help="responses per prompt")
    parser.add_argument("--instances", type=NumberOption(SimulatedInstances), metavar="N", help="number of instances")
    parser.add_argument(
        "--nodes",
        type=NumberOption(SimulatedInstances),
        metavar="N",
        help="nodes of 8 GPUs, filled with instances; the paper's workloads get as many more prompts",
    )
    parser.add_argument(
        "--nic-gbps",
        type=NumberOption(Gigabits),
        metavar="X",
        help="Gbit/s of each node's network card, which all KV of the node shares (400 per GPU for each transfer)",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=NumberOption(Count),
        metavar="T",
        help="tokens a request may generate before it is placed anew",
    )
    parser.add_argument(
        "--seeds",
        default="0",
        metavar="S,...|S..T",
        help="one set of lengths for each; with several, means and ranges (%(default)s)",
    )
    parser.add_argument(
        "--iterations",
        type=NumberOption(Count),
        metavar="N",
        help="whole iterations in a row, with training and length hints carried over; the paper's workloads only",
    )
    _add_output_options(parser)
    _add_cluster_options(parser)
    _add_shape_options(parser)
    _add_turn_options(parser)
    parser.set_defaults(run=run)


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of the table")
    parser.add_argument(
        "--no-timing", action="store_true", help="leave simulator_wall_s out, so that outputs are equal byte for byte"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write results.json, and per scheduler its events, a trace and plots",
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier simulation in --out")


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    cluster = parser.add_argument_group("for all but the paper's workloads")
    cluster.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MODELS)} (llama-8b)")
    cluster.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)} (h200)")
    cluster.add_argument("--num-gpus", type=NumberOption(SimulatedGpus), metavar="N", help="GPUs per instance (1)")
    cluster.add_argument(
        "--prompt-tokens", type=NumberOption(Count), metavar="N", help="length of prompts (as recorded, or 512)"
    )
    cluster.add_argument(
        "--max",
        type=NumberOption(Count),
        metavar="N",
        dest="maximum",
        help="longest response allowed (as recorded, or 32768)",
    )


def _add_shape_options(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("for synthetic lengths and agent-tools")
    shape.add_argument("--groups", type=NumberOption(Count), metavar="N", help="number of prompts (64)")
    shape.add_argument(
        "--mean", type=NumberOption(Count), metavar="N", help="mean length (4000; agent-tools, all turns: 1500)"
    )
    shape.add_argument(
        "--sigma",
        "--shape",
        type=NumberOption(LogSpread),
        metavar="X",
        help="spread of the log of lengths (1.0); 0: all equal",
    )
    shape.add_argument(
        "--correlation", type=NumberOption(Probability), metavar="X", help="share of the spread common to a group (0.7)"
    )


def _add_turn_options(parser: argparse.ArgumentParser) -> None:
    turns = parser.add_argument_group(f"for {' and '.join(AGENTS)}")
    turns.add_argument(
        "--while-waiting",
        metavar="WAY,...",
        help="what happens to the KV of requests that wait for their tools, one row for each (hold,recompute,park): "
        "hold: it stays on the instance, so fewer requests are let in; recompute: it may be pushed out, and is then "
        "computed again; park: it rests in the pool. verl, verl-sync and group have no pool: park is recompute there",
    )
    turns.add_argument("--tool-s", type=NumberOption(Seconds), metavar="X", help="median seconds of a tool (2; 1.5)")
    turns.add_argument(
        "--tool-sigma", type=NumberOption(LogSpread), metavar="X", help="spread of their log (1.2; 0.8); 0: all equal"
    )
    turns.add_argument(
        "--given-tokens", type=NumberOption(Count), metavar="N", help="median tokens of a tool's answer (400; 300)"
    )
    turns.add_argument(
        "--turns", type=NumberOption(Count), metavar="N", help="agent-tools: most turns of a response (12)"
    )


def run(args: argparse.Namespace) -> int:
    """Simulate each scheduler, then print and write the results."""
    schedulers = _schedulers(args.schedulers)
    ways = _ways(args)
    seeds = parse_seeds(args.seeds)
    if args.out is not None and len(seeds) > 1:
        raise ConfigError(f"--out with {len(seeds)} seeds", hint="--out keeps the events of one: --seeds 0")
    if args.iterations is not None and (args.nodes is not None or args.nic_gbps is not None):
        raise ConfigError("--iterations simulates no network", hint="leave --nodes and --nic-gbps out")
    workloads = {seed: _workload(args, seed) for seed in seeds}
    if args.iterations is not None:
        return run_iterations(args, schedulers, seeds)
    first = workloads[seeds[0]]
    folder = None
    if args.out is not None:
        folder = SimulationFolder(args.out, first.name, first.num_instances, first.limits().kv_tokens, force=args.force)
    pairs = [(scheduler, way) for scheduler in schedulers for way in ways]
    rows = [row for seed, workload in workloads.items() for row in _simulate_all(workload, seed, pairs, args, folder)]
    if folder is not None:
        folder.write_results(_encode(rows))
    if args.json:
        sys.stdout.buffer.write(_encode(rows))
        sys.stdout.flush()
    else:
        console = wide_console(170)
        console.print(describe(first, seeds), highlight=False, soft_wrap=True)
        (print_table if len(seeds) == 1 else print_means)(console, rows)
        if args.out is not None:
            sys.stdout.write(f"events, traces and plots are in {args.out}\n")
    return 0


def _workload(args: argparse.Namespace, seed: int) -> Workload:
    return load_workload(
        args.workload,
        WorkloadOptions(
            seed=seed,
            group_size=args.group_size,
            instances=args.instances,
            nodes=args.nodes,
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
            tool_s=args.tool_s,
            tool_sigma=args.tool_sigma,
            given_tokens=args.given_tokens,
            turns=args.turns,
        ),
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


def _ways(args: argparse.Namespace) -> list[WhileWaiting]:
    """What happens to KV while requests wait; without turns nothing does, and there is one way."""
    if args.workload not in AGENTS:
        if args.while_waiting is not None:
            hint = f"its responses have no turns; use {' or '.join(AGENTS)}"
            raise ConfigError(f"--while-waiting does not apply to {args.workload}", hint=hint)
        return ["park"]
    ways: list[WhileWaiting] = []
    for name in (args.while_waiting or DEFAULT_WAYS).split(","):
        way = next((known for known in WAYS if known == name.strip()), None)
        if way is None or way in ways:
            raise ConfigError(f"--while-waiting {args.while_waiting!r}", hint=f"each once: {', '.join(WAYS)}")
        ways.append(way)
    return ways


def _simulate_all(
    workload: Workload,
    seed: int,
    pairs: list[tuple[str, WhileWaiting]],
    args: argparse.Namespace,
    folder: SimulationFolder | None,
) -> list[Row]:
    oracle: tuple[str, WhileWaiting] = (ORACLE, "park")
    todo = pairs if oracle in pairs else [*pairs, oracle]
    results: dict[tuple[str, WhileWaiting], SimulationResult] = {}
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        for pair in todo:
            scheduler, way = pair
            name = f"{scheduler}-{way}" if workload.turns else scheduler
            bar = bars.add_task(name, total=len(workload.lengths))
            recorder: contextlib.AbstractContextManager[EventSink | None] = contextlib.nullcontext(None)
            if folder is not None and pair in pairs:
                recorder = folder.recorder(name, run_metadata(workload, scheduler, args.speculation, seed, way))
            with recorder as events:
                results[pair] = simulate(
                    workload,
                    scheduler,
                    speculation=args.speculation,
                    while_waiting=way,
                    network=None if args.nic_gbps is None else NetworkShape(nic_bytes_s=args.nic_gbps * 1e9 / 8),
                    events=events,
                    progress=lambda done, bar=bar: bars.update(bar, completed=done),  # type: ignore[misc]
                )
    oracle_tokens_s = results[oracle].summary.throughput_tokens_s
    return [
        make_row(
            workload, results[pair], oracle_tokens_s, seed=seed, speculation=args.speculation, timing=not args.no_timing
        )
        for pair in pairs
    ]


def _encode(rows: list[Row]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n"
