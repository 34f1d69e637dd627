# SPDX-License-Identifier: Apache-2.0
"""Sequence slots while many responses end at their limit: `seer` with its rule for that (seer.at_limit), and without.

    python benchmarks/simulator/at_limit.py [--seeds N]

Memory is to spare and slots are scarce throughout. Throughput with the rule over without, the mean over arrangements,
for a first rollout and for one after two others of the same shape, which have shown how many end at the limit; beside
them `verl` over `seer` with the rule in a first rollout, and what `seer-oracle` has over it. No speculation.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from configurations import AGENT, R1, Synthetic

from seer.sim.cluster import simulate
from seer.sim.workloads import Workload
from seer.spread import Spread
from stamp import print_stamp

NEVER = 2.0
"""No share of responses is as large."""
EARLIER = 2


def scarce(
    slots: int, maximum: int = 16_384, sigma: float = 1.0, correlation: float = 0.8, mean: int = 2000
) -> Synthetic:
    """As `configurations.py` has them, with memory to spare."""
    return Synthetic(max_num_seqs=slots, maximum=maximum, sigma=sigma, correlation=correlation, mean=mean, memory=1.5)


SHAPES: dict[str, Synthetic] = {
    "16 slots": scarce(16),
    "32 slots, correlation 0.4": scarce(32, correlation=0.4),
    "32 slots, uncorrelated": scarce(32, correlation=0.0),
    "agent lengths, 16 slots": Synthetic(**AGENT, max_num_seqs=16, memory=1.5),
    "16 slots, sigma 1.5": scarce(16, sigma=1.5),
    "16 slots, limit 8,192": scarce(16, 8192),
    "32 slots, limit 8,192": scarce(32, 8192),
    "16 slots, limit 8,192, correlation 0.5": scarce(16, 8192, correlation=0.5),
    "16 slots, limit 8,192, correlation 0.95": scarce(16, 8192, correlation=0.95),
    "R1 lengths, 16 slots": Synthetic(**R1, max_num_seqs=16, memory=1.5),
    "R1 lengths, 32 slots": Synthetic(**R1, max_num_seqs=32, memory=1.5),
    "R1 lengths, 64 slots": Synthetic(**R1, max_num_seqs=64, memory=1.5),
    "16 slots, limit 8,192, sigma 1.5": scarce(16, 8192, sigma=1.5),
    "the same, correlation 0.95": scarce(16, 8192, sigma=1.5, correlation=0.95),
    "32 slots, limit 4,096, sigma 2, correlation 0.6": scarce(32, 4096, 2.0, 0.6, 1000),
    "16 slots, limit 2,048, sigma 1.5, correlation 0.6": scarce(16, 2048, 1.5, 0.6, 700),
    "16 slots, limit 4,096": scarce(16, 4096),
    "32 slots, limit 4,096": scarce(32, 4096),
    "32 slots, limit 4,096, correlation 0.95": scarce(32, 4096, correlation=0.95),
}


def seconds(workload: Workload, scheduler: str, spread: Spread | None = None) -> float:
    return simulate(workload, scheduler, speculation="off", spread=spread or Spread()).summary.makespan_s


def with_share(share: float | None, shape: Synthetic, name: str, seed: int, earlier: int) -> float:
    """Seconds of `seer`; `share` in place of the one that the rule has."""
    with mock.patch("seer.at_limit.LIMIT_SHARE", share) if share is not None else nullcontext():
        spread = Spread()
        for at in range(earlier):
            seconds(shape.workload(name, 1000 + earlier * seed + at), "seer", spread)
        return seconds(shape.workload(name, seed), "seer", spread)


def share_at_limit(workload: Workload) -> float:
    lengths = [length for row in workload.lengths for length in row]
    return sum(length >= workload.max_tokens for length in lengths) / len(lengths)


def row(name: str, shape: Synthetic, num_seeds: int) -> str:
    """A line of the table."""
    gains: dict[int, float] = {}
    for earlier in (0, EARLIER):
        pairs = [[with_share(share, shape, name, s, earlier) for share in (NEVER, None)] for s in range(num_seeds)]
        gains[earlier] = fmean(without / ruled for without, ruled in pairs)
    over: list[float] = []
    for scheduler in ("verl", "seer-oracle"):
        ratios = []
        for seed in range(num_seeds):
            workload = shape.workload(name, seed)
            ratios.append(seconds(workload, scheduler) / with_share(None, shape, name, seed, 0))
        over.append(fmean(ratios))
    share = fmean(share_at_limit(shape.workload(name, seed)) for seed in range(num_seeds))
    return f"| {name} | {share:.1%} | {gains[0]:.3f} | {gains[EARLIER]:.3f} | {over[0]:.3f} | {over[1]:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    args = parser.parse_args()
    print_stamp(args)
    print("| shape | at the limit | first rollout | after two | over verl | share of seer-oracle |")
    print("|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        print(row(name, shape, args.seeds), flush=True)


if __name__ == "__main__":
    main()
