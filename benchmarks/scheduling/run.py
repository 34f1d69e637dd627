# SPDX-License-Identifier: Apache-2.0
"""Does scheduling scale? Three claims, one command each. results.md has the numbers.

    run.py decisions    cost of a decision from 1,000 to 1,000,000 waiting requests
    run.py million      1,000,000 requests on 1,024 instances, in virtual time
    run.py workload     qwen2-vl-72b, each scheduler: under 5 s on one core

Seconds marked cpu are processor seconds of this process: on a shared machine wall time says little.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.buffer import Request, RequestBuffer
from seer.context import Context
from seer.fleet import Fleet
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.sim.catalog import WorkloadOptions, load_workload
from seer.sim.cluster import simulate
from seer.types import ChunkEnd, ChunkOutput, Group, InstanceLimits, Sampling
from stamp import print_stamp

GROUP_SIZE = 16
CHUNK_TOKENS = 2048
REQUESTS_PER_INSTANCE = 1000
MEASURED_DECISIONS = 20_000


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def cost_per_decision(scheduler_name: str, num_requests: int) -> float:
    """Processor seconds to choose a chunk, place it and apply its output: the work of a rollout for every chunk.

    All requests wait at first. Instances are filled. From then on, each chunk that ends makes room for one more.
    Every other chunk ends its request, so that the length estimates change too.
    """
    num_instances = max(1, num_requests // REQUESTS_PER_INSTANCE)
    limits = InstanceLimits(kv_blocks=4000, block_size=64, max_num_seqs=1024, max_model_len=100_000)
    context = Context()
    buffer, fleet = RequestBuffer(), Fleet([limits] * num_instances)

    def length(request: Request) -> int:
        return 1000 + request.id * 7919 % 15_000

    scheduler = make_scheduler(
        parse_scheduler(scheduler_name), SchedulerSettings(chunk_tokens=CHUNK_TOKENS), context, length
    )
    sampling = Sampling(max_tokens=16_384)
    groups = [
        Group(id=i, num_requests=GROUP_SIZE, num_prompt_tokens=512, sampling=sampling)
        for i in range(num_requests // GROUP_SIZE)
    ]
    scheduler.admit(buffer.admit(groups, 0.0), fleet)
    running: deque[tuple[Request, ChunkOutput]] = deque()

    def fill() -> int:
        started = 0
        while (plan := scheduler.next(fleet)) is not None:
            chunk = buffer.start(plan.request, plan.instance, plan.max_tokens, plan.load_kv, 0.0)
            fleet.promise(plan.request, plan.instance, plan.num_blocks, overcommit=plan.overcommit)
            end = ChunkEnd.STOP if (plan.request.id + chunk.attempt) % 2 else ChunkEnd.LIMIT
            output = ChunkOutput(chunk.request, chunk.attempt, plan.instance, chunk.max_tokens, end=end)
            running.append((plan.request, output))
            started += 1
        return started

    fill()
    decisions = 0
    began_s = time.process_time()
    # A rollout with few requests ends before that many decisions.
    while decisions < MEASURED_DECISIONS and running:
        request, output = running.popleft()
        buffer.apply(output, 0.0)
        fleet.give_back(request)
        if request.ended:
            context.observe_finished(request)
            scheduler.finished(request)
        else:
            scheduler.requeue(request)
        decisions += fill()
    return (time.process_time() - began_s) / max(1, decisions)


def decisions(args: argparse.Namespace) -> None:
    sizes = [10**exponent for exponent in range(3, args.exponent + 1)]
    print("| scheduler | " + " | ".join(f"{size:,}" for size in sizes) + " | growth | log n grows | median over best |")
    print("|---" * (len(sizes) + 4) + "|")
    for scheduler in args.schedulers.split(","):
        # A small rollout makes few decisions and takes milliseconds, so it is repeated more often.
        runs = [
            sorted(cost_per_decision(scheduler, size) for _ in range(args.repeats * max(1, MEASURED_DECISIONS // size)))
            for size in sizes
        ]
        costs = [run[0] for run in runs]
        shown = " | ".join(f"{1e6 * cost:.1f} us" for cost in costs)
        growth = math.log(sizes[-1]) / math.log(sizes[0])
        spread = ", ".join(f"{run[len(run) // 2] / run[0]:.2f}" for run in runs)
        print(f"| {scheduler} | {shown} | {costs[-1] / costs[0]:.2f}x | {growth:.2f}x | {spread} |", flush=True)
    print(f"peak memory {peak_gib():.2f} GiB")


def million(args: argparse.Namespace) -> None:
    workload = load_workload(
        "synthetic",
        WorkloadOptions(
            groups=args.requests // GROUP_SIZE,
            group_size=GROUP_SIZE,
            mean=2000,
            maximum=16_384,
            instances=args.instances,
        ),
    )
    for scheduler in args.schedulers.split(","):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        summary = simulate(workload, scheduler, speculation=args.speculation).summary
        print(
            f"{scheduler}: {summary.num_requests:,} requests on {args.instances:,} instances in "
            f"{time.perf_counter() - began_s:,.0f} s ({time.process_time() - began_cpu_s:,.0f} s cpu), "
            f"{peak_gib():.2f} GiB; makespan {summary.makespan_s:,.0f} s, "
            f"{summary.preemptions} preemptions, {summary.migrations:,} migrations",
            flush=True,
        )


def workload(args: argparse.Namespace) -> None:
    paper = load_workload("qwen2-vl-72b")
    for scheduler in args.schedulers.split(","):
        began_cpu_s = time.process_time()
        result = simulate(paper, scheduler)
        print(f"{scheduler}: {result.wall_s:.1f} s ({time.process_time() - began_cpu_s:.1f} s cpu)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    scale = commands.add_parser("decisions")
    scale.add_argument("--schedulers", default="divided,context,seer,oracle")
    scale.add_argument("--exponent", type=int, default=6, help="up to 10^E requests")
    scale.add_argument("--repeats", type=int, default=3)
    scale.set_defaults(run=decisions)
    large = commands.add_parser("million")
    large.add_argument("--schedulers", default="seer")
    large.add_argument("--requests", type=int, default=1_000_000)
    large.add_argument("--instances", type=int, default=1024)
    large.add_argument("--speculation", default="off", choices=("auto", "off"))
    large.set_defaults(run=million)
    speed = commands.add_parser("workload")
    speed.add_argument("--schedulers", default="verl-sync,verl,divided,context,oracle,seer-paper,seer,verl-sync+sd")
    speed.set_defaults(run=workload)
    args = parser.parse_args()
    print_stamp(args)
    args.run(args)


if __name__ == "__main__":
    main()
