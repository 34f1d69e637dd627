# SPDX-License-Identifier: Apache-2.0
"""Whole iterations of the paper's workloads: rollout, training and weight update, several in a row.

Rollouts are simulated. Training and weight update take what the paper's Table 1 says they take beside veRL's rollout,
the same for every scheduler. Rewards are computed beside the rollout, as in the paper, and add nothing. Every iteration
has the same prompts in another order, with new responses. How far groups outgrow their first finish is carried over, as
in production; length hints of the last one are if asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from seer.sim.cluster import Speculation, simulate
from seer.sim.paper_numbers import FIGURE_8, PHASE_SHARES
from seer.sim.workloads import PAPER, Workload, paper_workload
from seer.spread import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """Seconds of the phases of one iteration."""

    rollout_s: float
    tail_s: float
    """Part of the rollout in which only the last tenth of the responses runs."""
    training_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        """All phases, one after the other."""
        return self.rollout_s + self.training_s + self.update_s


def other_phases_s(name: str) -> tuple[float, float]:
    """Seconds of training and of the weight update, from veRL's rollout seconds and the paper's shares."""
    rollout, training, update = PHASE_SHARES[name]
    verl_s, _ = FIGURE_8[name]["veRL"]
    return verl_s * training / rollout, verl_s * update / rollout


def iteration_workload(name: str, seed: int, iteration: int, *, shrink: int = 1) -> Workload:
    """The prompts of `seed`, in another order and with new responses for every iteration."""
    workload = paper_workload(name, seed=seed, shrink=shrink)
    rows = PAPER[name].lengths.sample(len(workload.lengths), workload.group_size, seed, iteration=iteration)
    order = np.random.default_rng((seed, iteration, 1)).permutation(len(rows))
    return replace(
        workload,
        lengths=tuple(tuple(rows[group]) for group in order),
        keys=tuple(str(group) for group in order),
    )


def iterate(
    name: str,
    scheduler: str,
    *,
    seed: int = 0,
    num_iterations: int = 10,
    carry_hints: bool = True,
    speculation: Speculation = "auto",
    shrink: int = 1,
) -> Iterator[Iteration]:
    """Simulate iterations one after the other."""
    training_s, update_s = other_phases_s(name)
    hints: Mapping[str, int] = {}
    spread = Spread()
    for number in range(num_iterations):
        workload = iteration_workload(name, seed, number, shrink=shrink)
        result = simulate(workload, scheduler, speculation=speculation, length_hints=hints, spread=spread)
        hints = result.length_hints if carry_hints else {}
        summary = result.summary
        yield Iteration(rollout_s=summary.makespan_s, tail_s=summary.tail_s, training_s=training_s, update_s=update_s)
