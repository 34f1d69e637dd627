# SPDX-License-Identifier: Apache-2.0
"""Fit each paper workload to what the paper measured on veRL, and to nothing else.

    time      `overhead_s` and `slowdown`, scaled together, to veRL's total seconds (Fig. 8). Its tail seconds, which
              the assumed spread of lengths and share of memory decide, are printed beside the paper's.
    grouped   `level` and `verify_context_share`, to acceptance length and speedup of grouped speculation (Fig. 11)
    plain     `pass_s`, to the speedup of plain speculation (Fig. 11); its acceptance is the paper's

Prints the values to put into `seer.sim.workloads.PAPER`. All other numbers that the simulator gives for the paper are
predictions.

    python benchmarks/simulator/calibrate.py [--seeds N] [workload ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.metrics.summary import Summary
from seer.sim.cluster import simulate
from seer.sim.paper_numbers import FIGURE_8, SD_ON_VERL
from seer.sim.workloads import PAPER, Workload, paper_workload
from seer.types import DraftMode
from stamp import print_stamp

VERL = "verl-sync"


def runs(workloads: list[Workload], drafts: DraftMode) -> list[Summary]:
    """veRL on every arrangement, with these drafts."""
    return [simulate(workload, VERL, drafts=drafts).summary for workload in workloads]


def with_speculation(workload: Workload, level: float, verify: float, pass_s: float) -> Workload:
    """The workload with other numbers of its speculation."""
    plain = workload.drafts.plain
    assert plain is not None, "the paper's workloads have plain speculation of their own"
    drafts = replace(workload.drafts, level=level, plain=replace(plain, pass_s=pass_s))
    return replace(workload, drafts=drafts, cost=replace(workload.cost, verify_context_share=verify))


def solve(
    target: np.ndarray, start: np.ndarray, measure: Callable[[np.ndarray], np.ndarray], step: float
) -> np.ndarray:
    """Newton's method with numerical derivatives, for as many numbers as targets; they stay above 0."""
    x = start
    for _ in range(4):
        miss = measure(x) - target
        print(f"  {x.round(4)} misses by {miss.round(3)}", flush=True)
        if np.abs(miss).max() < 0.01:
            break
        slopes = np.stack([(measure(x + d) - target - miss) / step for d in step * np.eye(len(x))], axis=1)
        x = np.maximum(0.0, x - np.linalg.lstsq(slopes + 1e-9, miss, rcond=None)[0])
    return x


def fit(name: str, num_seeds: int) -> None:
    """Fit one workload and print what was found."""
    spec, (total_s, tail_s) = PAPER[name], FIGURE_8[name]["veRL"]
    workloads = [paper_workload(name, seed=seed) for seed in range(num_seeds)]
    plain_runs = runs(workloads, "none")
    scale = total_s / np.mean([run.makespan_s for run in plain_runs])
    tail = scale * np.mean([run.tail_s for run in plain_runs])
    print(f"{name}: overhead_s={spec.overhead_s * scale:.5f} slowdown={spec.slowdown * scale:.4f}")
    print(
        f"  tail {tail:.0f} s, paper {tail_s:.0f}; idle {np.mean([run.idle_share for run in plain_runs]):.1%}, "
        f"{np.mean([run.preemptions for run in plain_runs]):,.0f} preemptions",
        flush=True,
    )
    costs = {"overhead_s": spec.overhead_s * scale, "slowdown": spec.slowdown * scale}
    workloads = [replace(one, cost=replace(one.cost, **costs)) for one in workloads]
    base_s = total_s

    def measured(level: float, verify: float, pass_s: float, drafts: DraftMode) -> tuple[float, float]:
        done = runs([with_speculation(one, level, verify, pass_s) for one in workloads], drafts)
        return base_s / np.mean([r.makespan_s for r in done]), np.mean([r.mean_accepted for r in done])

    plain = spec.drafts.plain
    assert plain is not None, "the paper's workloads have plain speculation of their own"
    level, verify = solve(
        np.array(SD_ON_VERL[name]["grouped"]),
        np.array([spec.drafts.level, spec.verify_context_share]),
        lambda x: np.array(measured(x[0], x[1], plain.pass_s, "grouped-paper")),
        0.05,
    )
    print(f"  level={level:.3f} verify_context_share={verify:.3f}", flush=True)
    if plain.pass_s:
        target = np.array(SD_ON_VERL[name]["plain"][:1])
        (pass_s,) = solve(
            target, np.array([plain.pass_s]), lambda x: np.array(measured(level, verify, x[0], "own")[:1]), 0.001
        )
        print(f"  pass_s={pass_s:.5f}", flush=True)
    ours = np.round(measured(level, verify, plain.pass_s, "own"), 3)
    print(f"  plain speculation: {ours}, paper {SD_ON_VERL[name]['plain']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="workload", help=", ".join(PAPER))
    parser.add_argument("--seeds", type=int, default=16, metavar="N", help="arrangements to average (%(default)s)")
    args = parser.parse_args()
    if unknown := set(args.workloads) - set(PAPER):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}; known are {', '.join(PAPER)}")
    print_stamp(args)
    for workload in args.workloads or PAPER:
        fit(workload, args.seeds)


if __name__ == "__main__":
    main()
