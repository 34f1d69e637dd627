# SPDX-License-Identifier: Apache-2.0
"""One cell of the paper for each workload, simulated on a small draw: an eighth or a quarter of the cluster."""

import pytest

from seer.sim.paper import Job, answer, claims, run_jobs

SHRINK = {"moonlight": 8, "qwen2-vl-72b": 4, "kimi-k2": 4}
SEEDS = (0, 1)


@pytest.mark.parametrize("workload", SHRINK)
def test_a_small_draw_gains_from_context_what_the_paper_gains_within_a_quarter(workload: str) -> None:
    cell = next(c for c in claims() if c.row == "+ context scheduling" and c.workload == workload)
    jobs: list[Job] = [job for seed in SEEDS for job in cell.jobs(seed, SHRINK[workload])]
    got = answer(cell, run_jobs(jobs), SEEDS, SHRINK[workload])
    assert got.error is not None
    assert abs(got.error) < 0.25, f"{workload}: {got.ours:.2f}, paper {cell.paper}"
