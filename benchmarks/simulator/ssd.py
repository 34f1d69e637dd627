# SPDX-License-Identifier: Apache-2.0
"""How fast an SSD must read so that paused KV on it beats computing that KV again: a quarter of a workload, simulated.

    python benchmarks/simulator/ssd.py [--workload qwen2-vl-72b] [--gigabytes-s 6,12,24] [--seed 0]

The pool's DRAM holds half of what the instances' own KV memory does, and all instances read from one SSD (or one set of
them) of the given speed, without and with prefetching. Beside them: DRAM for everything, and the same DRAM without an
SSD. No speculation.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.placement import PlacementConfig
from seer.scheduling.registry import SchedulerSettings
from seer.sim.catalog import WorkloadOptions, load_workload
from seer.sim.cluster import simulate
from seer.sim.pool_tiers import PoolShape, PoolTiers
from seer.sim.workloads import Workload
from seer.transfer import TransferEstimate
from stamp import print_stamp

PARTS = 4
"""The workload and its cluster are divided by this: every variant takes seconds."""


def run(workload: Workload, scheduler: str, shape: PoolShape | None, ahead: int) -> str:
    costs = replace(workload.cost.transfer_costs(), prefetch_tokens=ahead)
    placement = PlacementConfig(transfer=TransferEstimate(costs))
    settings = SchedulerSettings(chunk_tokens=workload.chunk_tokens, placement=placement)
    pool = PoolTiers(shape) if shape is not None else None
    found = simulate(workload, scheduler, speculation="off", settings=settings, pool=pool).summary
    reads = f", {pool.num_read_ahead} requests read ahead, {pool.num_read_late} late" if pool is not None else ""
    return f"{found.makespan_s:8.1f} s, {found.recomputed_tokens:,} tokens computed again{reads}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="qwen2-vl-72b")
    parser.add_argument("--scheduler", default="seer")
    parser.add_argument("--gigabytes-s", default="6,12,24", help="speeds of the SSD (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print_stamp(args)
    whole = load_workload(args.workload, WorkloadOptions(seed=args.seed))
    lengths, num_instances = whole.lengths[: len(whole.lengths) // PARTS], max(1, whole.num_instances // PARTS)
    workload = replace(whole, lengths=lengths, num_instances=num_instances)
    dram_tokens = num_instances * workload.cost.kv_tokens // 2
    shape = PoolShape(dram_tokens=dram_tokens, ssd_tokens=0, ssd_tokens_s=1.0)
    print(f"DRAM for everything      {run(workload, args.scheduler, None, 0)}", flush=True)
    print(f"DRAM alone               {run(workload, args.scheduler, shape, 0)}", flush=True)
    for speed in map(float, args.gigabytes_s.split(",")):
        tokens_s = speed * 1e9 / workload.cost.model.kv_bytes_per_token
        over_ssd = replace(shape, ssd_tokens=10**12, ssd_tokens_s=tokens_s)
        for name, ahead in (("no prefetch", 0), ("prefetch", dram_tokens // 4)):
            shown = f"SSD {speed:g} GB/s, {name}"
            print(f"{shown:<24} {run(workload, args.scheduler, over_ssd, ahead)}", flush=True)


if __name__ == "__main__":
    main()
