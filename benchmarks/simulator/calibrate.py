# SPDX-License-Identifier: Apache-2.0
"""Fit the two free numbers of each paper workload, `overhead_s` and `slowdown`, to the paper's veRL rows.

Only total and tail seconds of veRL (Fig. 8) are fitted; every other number that the simulator gives for the paper is a
prediction. Prints the values to put into `seer.sim.workloads.PAPER`.

    python benchmarks/simulator/calibrate.py [workload ...]
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.sim import workloads
from seer.sim.cluster import simulate
from stamp import print_stamp

VERL_SECONDS = {"moonlight": (3910, 1817), "qwen2-vl-72b": (3957, 2301), "kimi-k2": (12202, 3144)}
SEEDS = (0, 1, 2)
LOW, HIGH = np.log([0.001, 0.8]), np.log([0.2, 10.0])


def verl(name: str, log_overhead: float, log_slowdown: float) -> np.ndarray:
    """Mean total and tail seconds of `verl-sync` over the seeds."""
    spec = workloads.PAPER[name]
    workloads.PAPER[name] = replace(spec, overhead_s=math.exp(log_overhead), slowdown=math.exp(log_slowdown))
    runs = [simulate(workloads.paper_workload(name, seed=seed), "verl-sync").summary for seed in SEEDS]
    return np.array([np.mean([run.makespan_s for run in runs]), np.mean([run.tail_s for run in runs])])


def fit(name: str) -> None:
    """Levenberg's method in the logarithms of both numbers. They have nearly the same effect, so steps are damped."""
    spec = workloads.PAPER[name]
    x = np.log([spec.overhead_s, spec.slowdown])
    target = np.log(VERL_SECONDS[name])
    for _ in range(6):
        miss = np.log(verl(name, *x)) - target
        print(f"{name}: overhead_s={math.exp(x[0]):.4f} slowdown={math.exp(x[1]):.3f} miss={miss.round(4)}", flush=True)
        if np.abs(miss).max() < 0.004:
            break
        jacobian = np.stack([(np.log(verl(name, *(x + d))) - target - miss) / 0.05 for d in 0.05 * np.eye(2)], axis=1)
        step = np.linalg.solve(jacobian.T @ jacobian + 0.02 * np.eye(2), -jacobian.T @ miss)
        x = np.clip(x + step, LOW, HIGH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="workload", help=", ".join(VERL_SECONDS))
    args = parser.parse_args()
    if unknown := set(args.workloads) - set(VERL_SECONDS):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}; known are {', '.join(VERL_SECONDS)}")
    print_stamp(args)
    for workload in args.workloads or VERL_SECONDS:
        fit(workload)


if __name__ == "__main__":
    main()
