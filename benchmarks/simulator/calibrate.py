# SPDX-License-Identifier: Apache-2.0
"""Fit each paper workload to what the paper measured on veRL, and to nothing else.

    time      `overhead_s` and `slowdown`, scaled together, to veRL's total seconds (Fig. 8). Its tail seconds, which
              the assumed spread of lengths and share of memory decide, are printed beside the paper's.
    grouped   `verify_context_share`, to the speedup of grouped speculation (Fig. 11). Its acceptance length is printed
              beside the paper's, which may leave out steps without drafts. `level` is not fitted: see the design.
    plain     `pass_s`, to the speedup of plain speculation (Fig. 11); its acceptance is the paper's

Prints the values to put into `seer.sim.workloads.PAPER`. All other numbers that the simulator gives for the paper are
predictions. Speedups are fitted on a quarter of the cluster: veRL's instances do not affect each other.

    python benchmarks/simulator/calibrate.py [--seeds N] [--only time|speculation] [workload ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.metrics.summary import Summary
from seer.sim.cluster import simulate
from seer.sim.draft_model import PlainDrafts
from seer.sim.paper_numbers import FIGURE_8, SD_ON_VERL
from seer.sim.workloads import PAPER, Workload, paper_workload
from seer.types import DraftMode
from stamp import print_stamp

SHRINK = 4
"""For speculation."""


def runs(workloads: list[Workload], drafts: DraftMode) -> list[Summary]:
    """veRL on every arrangement, with these drafts."""
    return [simulate(workload, "verl-sync", drafts=drafts).summary for workload in workloads]


def fit_time(name: str, num_seeds: int) -> None:
    """Scale to veRL's total seconds."""
    spec, (total_s, tail_s) = PAPER[name], FIGURE_8[name]["veRL"]
    done = runs([paper_workload(name, seed=seed) for seed in range(num_seeds)], "none")
    scale = total_s / fmean(run.makespan_s for run in done)
    tail = scale * fmean(run.tail_s for run in done)
    print(f"{name}: overhead_s={spec.overhead_s * scale:.5f} slowdown={spec.slowdown * scale:.4f}")
    idle, preempted = fmean(run.idle_share for run in done), fmean(run.preemptions for run in done)
    print(f"  tail {tail:.0f} s, paper {tail_s:.0f}; idle {idle:.1%}, {preempted:,.0f} preemptions", flush=True)


def solve(target: float, start: float, measure: Callable[[float], float], step: float) -> float:
    """The secant method for a number that is at least 0."""
    x, ahead = start, start + step
    miss = measure(x) - target
    for _ in range(5):
        miss_ahead = measure(ahead) - target
        print(f"  {ahead:.5f} misses by {miss_ahead:+.3f}", flush=True)
        if abs(miss_ahead) < 0.005 or miss_ahead == miss or (ahead == 0.0 and miss_ahead < 0.0):
            break
        x, ahead, miss = ahead, max(0.0, ahead - miss_ahead * (ahead - x) / (miss_ahead - miss)), miss_ahead
    return ahead


class Speculating:
    """veRL with drafts on a part of the cluster, over veRL without."""

    def __init__(self, name: str, num_seeds: int) -> None:
        self._workloads = [paper_workload(name, seed=seed, shrink=SHRINK) for seed in range(num_seeds)]
        self._without = runs(self._workloads, "none")

    def measure(self, drafts: DraftMode, verify: float, plain: PlainDrafts) -> tuple[float, float]:
        """Speedup and acceptance length."""
        changed = [
            replace(
                one,
                drafts=replace(one.drafts, plain=plain),
                cost=replace(one.cost, verify_context_share=verify),
            )
            for one in self._workloads
        ]
        done = runs(changed, drafts)
        pairs = zip(self._without, done, strict=True)
        return fmean(a.makespan_s / b.makespan_s for a, b in pairs), fmean(run.mean_accepted for run in done)


def fit_speculation(name: str, num_seeds: int) -> None:
    """Fit to both speedups of figure 11."""
    spec, paper = PAPER[name], SD_ON_VERL[name]
    plain = spec.drafts.plain
    assert plain is not None, "the paper's workloads have plain speculation of their own"
    model = Speculating(name, num_seeds)
    print(f"{name}: grouped speculation", flush=True)
    start = max(0.0, spec.verify_context_share - 0.1)
    verify = solve(paper["grouped"][0], start, lambda x: model.measure("grouped-paper", x, plain)[0], 0.1)
    speedup, accepted = model.measure("grouped-paper", verify, plain)
    print(f"  verify_context_share={verify:.3f}: {speedup:.2f}, accepted {accepted:.2f}; paper {paper['grouped']}")
    if plain.pass_s:
        pass_s = solve(
            paper["plain"][0],
            plain.pass_s,
            lambda x: model.measure("own", verify, replace(plain, pass_s=x))[0],
            0.001,
        )
        plain = replace(plain, pass_s=pass_s)
    speedup, accepted = model.measure("own", verify, plain)
    print(f"  pass_s={plain.pass_s:.5f}: {speedup:.2f}, accepted {accepted:.2f}; paper {paper['plain']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="workload", help=", ".join(PAPER))
    parser.add_argument("--seeds", type=int, default=16, metavar="N", help="arrangements to average (%(default)s)")
    parser.add_argument("--only", choices=("time", "speculation"), help="fit one of both")
    args = parser.parse_args()
    if unknown := set(args.workloads) - set(PAPER):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}; known are {', '.join(PAPER)}")
    print_stamp(args)
    for workload in args.workloads or PAPER:
        if args.only != "speculation":
            fit_time(workload, args.seeds)
        if args.only != "time":
            fit_speculation(workload, args.seeds)


if __name__ == "__main__":
    main()
