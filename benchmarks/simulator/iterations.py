# SPDX-License-Identifier: Apache-2.0
"""Ten whole iterations in a row: rollout, training and weight update, with length hints carried over and without.

python benchmarks/simulator/iterations.py [--iterations N] [--seed S] [--shrink K] [workload ...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.sim.iterations import Iteration, iterate
from seer.sim.workloads import PAPER
from stamp import print_stamp

RUNS = (("verl-sync", False), ("seer-paper", False), ("seer-paper", True), ("seer", False), ("seer", True))
"""Scheduler, and whether hints are carried over."""


def line(name: str, scheduler: str, carry: bool, done: list[Iteration], baseline: list[Iteration]) -> str:
    """A row of the table."""
    rollout_s, total_s = sum(one.rollout_s for one in done), sum(one.total_s for one in done)
    rollout = sum(one.rollout_s for one in baseline) / rollout_s
    total = sum(one.total_s for one in baseline) / total_s
    return (
        f"| {name} | {scheduler}{', hints' if carry else ''} | {rollout:.2f} | {total:.2f} "
        f"| {rollout_s / total_s:.0%} | {sum(one.tail_s for one in done) / rollout_s:.0%} "
        f"| {done[0].rollout_s:,.0f} | {done[-1].rollout_s:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="workload", help=", ".join(PAPER))
    parser.add_argument("--iterations", type=int, default=10, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the prompts (%(default)s)")
    parser.add_argument("--shrink", type=int, default=1, metavar="K", help="divides the cluster (%(default)s)")
    args = parser.parse_args()
    if unknown := set(args.workloads) - set(PAPER):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}; known are {', '.join(PAPER)}")
    print_stamp(args)
    print("| workload | scheduler | rollout x | iteration x | rollout share | tail share | first s | last s |")
    print("|---|---|---|---|---|---|---|---|")
    for name in args.workloads or PAPER:
        baseline: list[Iteration] = []
        for scheduler, carry in RUNS:
            options = {"num_iterations": args.iterations, "shrink": args.shrink}
            done = list(iterate(name, scheduler, seed=args.seed, carry_hints=carry, **options))
            baseline = baseline or done
            print(line(name, scheduler, carry, done, baseline), flush=True)


if __name__ == "__main__":
    main()
