# SPDX-License-Identifier: Apache-2.0
"""Conversations in the simulator: KV of waiting requests parked in the pool, computed again, or held.

    python benchmarks/simulator/conversations.py [WORKLOAD] [--seeds 3] [--out FILE.json]

WORKLOAD is `synthetic` or `trace:FILE`, as for `seer simulate`. Its responses are split into turns, and a tool answers
after each (seer.sim.turns). Reads no clock but the simulated one: the numbers are the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.sim.catalog import WorkloadOptions, load_workload
from seer.sim.turns import TurnModel, Way, plan_turns, simulate_turns
from stamp import print_stamp

WAYS: tuple[Way, ...] = ("park", "recompute", "hold")


def main() -> None:
    """Simulate, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="synthetic")
    for name, default in (("groups", 64), ("group-size", 8), ("instances", 2), ("mean", 2000), ("maximum", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--turns", type=int, nargs=2, default=[2, 12])
    parser.add_argument("--given", type=int, nargs=2, default=[128, 2048])
    parser.add_argument("--tool-s", type=float, nargs=2, default=[0.2, 5.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scheduler", default="seer")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    stamp = print_stamp(args)
    model = TurnModel(turns=tuple(args.turns), given_tokens=tuple(args.given), tool_s=tuple(args.tool_s))
    runs = []
    for seed in range(args.seeds):
        own = (
            {} if args.workload != "synthetic" else {"groups": args.groups, "mean": args.mean, "maximum": args.maximum}
        )
        options = WorkloadOptions(
            seed=seed, group_size=args.group_size, instances=args.instances, prompt_tokens=args.prompt, **own
        )
        workload = load_workload(args.workload, options)
        plan = plan_turns(workload, model, seed)
        context = workload.num_requests * workload.prompt_tokens + sum(sum(one.given) for one in plan)
        for way in WAYS:
            summary = simulate_turns(workload, plan, way, scheduler=args.scheduler)
            runs.append({
                "way": way, "seed": seed, "seconds": round(summary.makespan_s, 1),
                "tokens_s": round(summary.throughput_tokens_s, 1),
                "recomputed_share": round(summary.recomputed_tokens / context, 4), "preemptions": summary.preemptions,
            })  # fmt: skip
            print(runs[-1], flush=True)
    for way in WAYS:
        mine = [run for run in runs if run["way"] == way]
        print(f"{way:<10} {statistics.mean(run['tokens_s'] for run in mine):10,.1f} tokens/s")
    if args.out is not None:
        args.out.write_text(json.dumps({"stamp": stamp, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
