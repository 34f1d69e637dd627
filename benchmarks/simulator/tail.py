# SPDX-License-Identifier: Apache-2.0
"""The tail against the total, and when groups are complete: the paper's schedulers, and `seer` with other spreads.

The spread says how many times as long as its group's longest finished response one may become (seer.context). It is
learned; here it is also fixed, from one that trusts the first finish to one that ignores it. Means over the seeds.

    python benchmarks/simulator/tail.py [--workload NAME] [--shrink K] [--seeds 0,1] [--speculation auto|off]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.metrics.summary import Summary
from seer.sim.cluster import simulate
from seer.sim.workloads import PAPER, paper_workload
from seer.spread import Spread
from stamp import print_stamp

SCHEDULERS = ("verl-sync", "context", "oracle", "seer", "seer-oracle")
FIXED_SPREADS = (1.0, 2.0, 4.0, 6.0, 10.0, 16.0, 1e6)
COLUMNS = ("makespan_s", "tail_s", "group_median_s", "group_p90_s", "group_last_s")


class FixedSpread(Spread):
    """Nothing is learned: the spread has this value from the start."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def _look(self) -> None:
        """Nothing."""


def summaries(scheduler: str, args: argparse.Namespace, spread: Spread | None = None) -> list[Summary]:
    """One simulation for each seed."""
    seeds = [int(seed) for seed in args.seeds.split(",")]
    workloads = [paper_workload(args.workload, seed=seed, shrink=args.shrink) for seed in seeds]
    options = {"speculation": args.speculation, "spread": spread}
    return [simulate(workload, scheduler, **options).summary for workload in workloads]


def line(name: str, found: list[Summary], verl_tail_s: float) -> str:
    """A row of the table."""
    means = [fmean(getattr(summary, column) for summary in found) for column in COLUMNS]
    return f"| {name} | " + " | ".join(f"{mean:,.0f}" for mean in means) + f" | {means[1] / verl_tail_s:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="qwen2-vl-72b", choices=PAPER)
    parser.add_argument("--shrink", type=int, default=4, metavar="K", help="divides the cluster (%(default)s)")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--speculation", choices=("auto", "off"), default="off")
    args = parser.parse_args()
    print_stamp(args)
    print("| | total s | tail s | half of the groups s | 90% | last | tail left of veRL's |")
    print("|---|---|---|---|---|---|---|")
    verl_tail_s = 0.0
    for scheduler in SCHEDULERS:
        found = summaries(scheduler, args)
        verl_tail_s = verl_tail_s or fmean(summary.tail_s for summary in found)
        print(line(f"`{scheduler}`", found, verl_tail_s), flush=True)
    for spread in FIXED_SPREADS:
        shown = "without bound" if spread == FIXED_SPREADS[-1] else f"{spread:g}"
        print(line(f"`seer`, spread {shown}", summaries("seer", args, FixedSpread(spread)), verl_tail_s), flush=True)


if __name__ == "__main__":
    main()
