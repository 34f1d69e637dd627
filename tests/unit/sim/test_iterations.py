# SPDX-License-Identifier: Apache-2.0
"""Iterations in a row: the same prompts, new responses, and what is carried over."""

from typing import Any

import numpy as np
import pytest

from seer.sim import iterations
from seer.sim.cluster import SimulationResult, simulate
from seer.sim.iterations import Iteration, iterate, iteration_workload, other_phases_s
from seer.spread import Spread


def test_an_iteration_has_the_same_prompts_in_another_order_with_new_responses() -> None:
    first, second = (iteration_workload("moonlight", 0, number, shrink=8) for number in (0, 1))
    assert first.keys != second.keys
    assert sorted(first.keys) == sorted(second.keys)
    by_key = [{key: np.log(row).mean() for key, row in zip(w.keys, w.lengths, strict=True)} for w in (first, second)]
    means = np.array([[lengths[key] for key in first.keys] for lengths in by_key])
    assert not np.array_equal(means[0], means[1])
    assert np.corrcoef(means)[0, 1] > 0.9  # a prompt stays long or short


def test_training_and_update_take_the_papers_shares_of_verls_iteration() -> None:
    training_s, update_s = other_phases_s("qwen2-vl-72b")
    assert 3957.0 / (3957.0 + training_s + update_s) == pytest.approx(0.63)
    assert Iteration(rollout_s=1.0, tail_s=0.5, training_s=2.0, update_s=3.0).total_s == 6.0


def test_the_spread_is_carried_to_the_next_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Spread | None] = []

    def noting(*args: Any, spread: Spread | None, **options: Any) -> SimulationResult:
        seen.append(spread)
        return simulate(*args, spread=spread, **options)

    monkeypatch.setattr(iterations, "simulate", noting)
    list(iterate("moonlight", "seer", num_iterations=2, carry_hints=False, speculation="off", shrink=16))
    assert seen[0] is seen[1]
    assert seen[0] is not None
    assert seen[0].known.num > 0


def test_hints_are_carried_to_the_next_iteration() -> None:
    def totals(carry: bool) -> list[float]:
        runs = iterate("moonlight", "context", num_iterations=2, carry_hints=carry, shrink=16)
        return [run.rollout_s for run in runs]

    carried, alone = totals(True), totals(False)
    assert carried[0] == alone[0]
    assert carried[1] != alone[1]
