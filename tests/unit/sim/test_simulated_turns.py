# SPDX-License-Identifier: Apache-2.0
"""Conversations in the simulator: equal work three ways, and what parking saves."""

from __future__ import annotations

import pytest

from builders import a_workload
from seer.sim.turns import RequestTurns, TurnModel, plan_turns, simulate_turns

LENGTHS = [[40 + 7 * (i * j % 11) for j in range(4)] for i in range(8)]
MODEL = TurnModel(turns=(1, 5), given_tokens=(20, 200), tool_s=(1.0, 20.0))


def test_turns_cover_a_response_exactly() -> None:
    workload = a_workload(LENGTHS, kv_tokens=3_000, prompt=100)
    plan = plan_turns(workload, MODEL, seed=3)
    lengths = [length for row in workload.lengths for length in row]
    assert [one.ends[-1] for one in plan] == lengths
    for one in plan:
        assert list(one.ends) == sorted(set(one.ends))
        assert len(one.given) == len(one.ends) - 1 == len(one.tool_s) - 1
    assert RequestTurns((3, 9), (5,), (1.0, 1.0)).end_after(3) == 9


@pytest.mark.parametrize("way", ["park", "recompute", "hold"])
def test_every_request_ends_with_its_tokens(way: str) -> None:
    workload = a_workload(LENGTHS, kv_tokens=3_000, prompt=100)
    plan = plan_turns(workload, MODEL)
    summary = simulate_turns(workload, plan, way)  # type: ignore[arg-type]
    assert (summary.num_requests, summary.num_tokens) == (workload.num_requests, workload.num_tokens)
    assert summary.makespan_s > max(sum(one.tool_s) for one in plan)
    again = simulate_turns(workload, plan, way)  # type: ignore[arg-type]
    assert again == summary


def test_parked_kv_is_not_computed_again() -> None:
    workload = a_workload(LENGTHS, kv_tokens=3_000, prompt=100)
    plan = plan_turns(workload, MODEL)
    parked = simulate_turns(workload, plan, "park")
    recomputed = simulate_turns(workload, plan, "recompute")
    assert parked.recomputed_tokens <= recomputed.recomputed_tokens
