# SPDX-License-Identifier: Apache-2.0
"""Conversations in the simulator: equal work three ways, and what parking saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import a_workload
from seer.metrics.events import Answered, Asked, Ended, Event
from seer.scheduling.registry import NAMES, parse_scheduler
from seer.sim.catalog import load_workload
from seer.sim.cluster import simulate
from seer.sim.turns import WAYS, LogNormal, RequestTurns, TurnModel, WhileWaiting, plan_turns
from seer.sim.workloads import Workload

LENGTHS = [[40 + 7 * (i * j % 11) for j in range(4)] for i in range(8)]
MODEL = TurnModel(
    tool_s=LogNormal(median=4.0, sigma=1.0, least=1.0, most=20.0),
    given_tokens=LogNormal(median=80, sigma=0.7, least=20, most=200),
    most_turns=5,
)
ON_POLICY = [name for name in NAMES if not parse_scheduler(name).off_policy]


def with_turns(seed: int = 0) -> Workload:
    return replace(a_workload(LENGTHS, kv_tokens=3_000, prompt=100), turns=plan_turns(LENGTHS, MODEL, seed))


def test_turns_cover_a_response_exactly() -> None:
    plan = plan_turns(LENGTHS, MODEL, seed=3)
    assert [one.ends[-1] for one in plan] == [length for row in LENGTHS for length in row]
    for one in plan:
        assert list(one.ends) == sorted(set(one.ends))
        assert 2 <= len(one.ends) <= 5
        assert len(one.given) == len(one.ends) - 1 == len(one.tool_s) - 1
        assert all(20 <= tokens <= 200 for tokens in one.given)
        assert all(1.0 <= seconds <= 20.0 for seconds in one.tool_s)
    assert RequestTurns((3, 9), (5,), (1.0, 1.0)).end_after(3) == 9
    assert plan == plan_turns(LENGTHS, MODEL, seed=3) != plan_turns(LENGTHS, MODEL, seed=4)


def test_recorded_numbers_of_turns_are_kept() -> None:
    counts = [[1 + (i + j) % 4 for j in range(4)] for i in range(8)]
    plan = plan_turns(LENGTHS, MODEL, 0, counts)
    assert [len(one.ends) for one in plan] == [count for row in counts for count in row]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheduler", ON_POLICY)
def test_every_request_ends_with_its_tokens_and_turns(scheduler: str, way: WhileWaiting) -> None:
    workload, seen = with_turns(), []

    def watch(event: Event) -> None:
        if isinstance(event, Asked | Answered):
            seen.append(event)

    summary = simulate(workload, scheduler, while_waiting=way, events=watch).summary
    assert (summary.num_requests, summary.num_tokens) == (workload.num_requests, workload.num_tokens)
    assert sum(isinstance(event, Asked) for event in seen) == sum(len(one.ends) for one in workload.turns)
    assert sum(event.num_tokens for event in seen if isinstance(event, Answered)) == sum(
        sum(one.given) for one in workload.turns
    )
    assert summary.makespan_s > max(sum(one.tool_s) for one in workload.turns)
    assert simulate(workload, scheduler, while_waiting=way).summary == summary


def test_parked_kv_is_loaded_and_not_computed_again_where_contexts_are_long() -> None:
    workload = load_workload("agent-swe")
    parked, recomputed = (simulate(workload, "seer", while_waiting=way).summary for way in ("park", "recompute"))
    assert parked.num_tokens == recomputed.num_tokens
    assert 100 * parked.recomputed_tokens < recomputed.recomputed_tokens
    assert parked.migrated_tokens > recomputed.recomputed_tokens / 2
    assert recomputed.migrated_tokens == 0


def test_held_kv_lets_fewer_talk_at_once() -> None:
    def most_open(way: WhileWaiting) -> int:
        talking: set[int] = set()
        most = 0

        def watch(event: Event) -> None:
            nonlocal most
            if isinstance(event, Asked):
                talking.add(event.request)
            elif isinstance(event, Ended):
                talking.discard(event.request)
            most = max(most, len(talking))

        simulate(with_turns(), "seer", while_waiting=way, events=watch)
        return most

    assert most_open("hold") < most_open("park") == sum(map(len, LENGTHS))
