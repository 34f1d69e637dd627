# SPDX-License-Identifier: Apache-2.0
"""What it would be worth to bring KV from the pool's SSD to DRAM before a tool answers: an upper bound, simulated.

    python benchmarks/simulator/near_answers.py [--workload agent-swe] [--gigabytes-s 3,6,12] [--dram 0.125]

The tool's time is known here, so KV is asked for at an exact time before the answer, which no estimate does better.
Beside it: DRAM for everything, no prefetching, and what the scheduler does (KV of requests that are queued, so whose
answer is there). The pool's DRAM holds a share of the instances' own KV memory; one SSD for all. Seconds are makespans.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.buffer import Request, chunk_of
from seer.placement import PlacementConfig
from seer.scheduling.registry import SchedulerSettings
from seer.sim.catalog import WorkloadOptions, load_workload
from seer.sim.cluster import simulate
from seer.sim.conversations import Conversations
from seer.sim.pool_tiers import PoolShape, PoolTiers
from seer.sim.workloads import Workload
from seer.transfer import TransferEstimate
from stamp import print_stamp

LEADS_S = (0.2, 1.0)
"""Before the answer: about what a read takes, and more."""


class Foreseeing(Conversations):
    """Tools that say when they are about to answer."""

    lead_s: float | None = None

    def on_turn(self, request: Request) -> None:
        """As without, and the KV is asked for ahead of the answer."""
        super().on_turn(request)
        turns, number = self._plan[request.id], request.num_turns - 1
        if self.lead_s is not None and number < len(turns.given):
            wait_s = max(0.0, turns.tool_s[number] - self.lead_s)
            asyncio.get_running_loop().call_later(wait_s, self._prefetch, request)

    def _prefetch(self, request: Request) -> None:
        assert self._loop is not None, "tools work while the loop serves"
        assert request.last_instance is not None, "it has had a turn"
        chunk = chunk_of(request, 0, request.remaining_limit)
        self._loop.instances[request.last_instance].prefetch(chunk)  # type: ignore[attr-defined]


def run(workload: Workload, shape: PoolShape | None, ahead: int, lead_s: float | None) -> str:
    costs = replace(workload.cost.transfer_costs(), prefetch_tokens=ahead)
    settings = SchedulerSettings(
        chunk_tokens=workload.chunk_tokens, placement=PlacementConfig(transfer=TransferEstimate(costs))
    )
    pool = PoolTiers(shape) if shape is not None else None
    with mock.patch("seer.sim.cluster.Conversations", Foreseeing), mock.patch.object(Foreseeing, "lead_s", lead_s):
        found = simulate(workload, "seer", settings=settings, pool=pool).summary
    reads = f", {pool.num_read_ahead} read ahead, {pool.num_read_late} late" if pool is not None else ""
    return f"{found.makespan_s:8.1f} s{reads}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="agent-swe")
    parser.add_argument("--gigabytes-s", default="3,6,12", help="speeds of the SSD (%(default)s)")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--dram", type=float, default=0.125, help="tokens of the pool's DRAM over the instances' own")
    parser.add_argument("--groups", type=int, help="the first of the workload; fewer leave instances idle")
    args = parser.parse_args()
    print_stamp(args)
    for seed in map(int, args.seeds.split(",")):
        workload = load_workload(args.workload, WorkloadOptions(seed=seed))
        if args.groups is not None:
            size = len(workload.lengths[0])
            workload = replace(
                workload,
                lengths=workload.lengths[: args.groups],
                keys=workload.keys[: args.groups],
                turns=workload.turns[: args.groups * size],
            )
        dram = int(workload.num_instances * workload.cost.kv_tokens * args.dram)
        print(f"seed {seed}, DRAM for everything      {run(workload, None, 0, None)}", flush=True)
        for speed in map(float, args.gigabytes_s.split(",")):
            tokens_s = speed * 1e9 / workload.cost.model.kv_bytes_per_token
            shape = PoolShape(dram_tokens=dram, ssd_tokens=10**12, ssd_tokens_s=tokens_s)
            ways = [("none", 0, None), ("when it is there", dram // 4, None)]
            ways += [(f"{lead_s:g} s before", dram // 4, lead_s) for lead_s in LEADS_S]
            for name, ahead, lead_s in ways:
                shown = f"seed {seed}, SSD {speed:g} GB/s, {name}"
                print(f"{shown:<35} {run(workload, shape, ahead, lead_s)}", flush=True)


if __name__ == "__main__":
    main()
