"""What steps cost is told apart: the step, its requests, the fact of drafting, and how much is drafted."""

from __future__ import annotations

import random

import pytest

from seer.engine.drafter import StepReport
from seer.engine.step_cost import MAX_STALLS, MeasuredCost


def a_step(seconds: float, *, requests: int = 8, depth: int = 0, drafted: int | None = None) -> StepReport:
    num_drafted = requests * depth if drafted is None else drafted
    return StepReport(
        duration_s=seconds,
        num_steps=1,
        num_running=requests,
        num_rows=requests + num_drafted,
        num_prefill_rows=0,
        mean_context_tokens=100,
        num_emitted=requests,
        num_drafted=num_drafted,
        num_accepted=0,
        num_allowed=depth,
    )


def test_the_cost_of_steps_is_learnt_and_prompts_are_left_out() -> None:
    cost = MeasuredCost()
    assert (cost.num_plain, cost.num_drafting) == (0, 0)
    prefill = StepReport(9.0, 1, 8, 500, 400, 100, 8, 0, 0)
    for i in range(90):
        requests, depth = 4 + i % 8, i % 3
        cost.learn(a_step(0.1 + 0.01 * requests * (1 + depth), requests=requests, depth=depth))
        cost.learn(prefill)
    assert (cost.num_plain, cost.num_drafting) == (30, 60)
    assert cost.step_s(4, 1) == pytest.approx(0.14, rel=0.03)
    assert cost.step_s(8, 3) == pytest.approx(0.34, rel=0.03)
    assert cost.step_s(8, 6) == pytest.approx(0.58, rel=0.05)  # never seen


def test_what_drafting_costs_as_such_is_not_charged_to_the_tokens() -> None:
    cost = MeasuredCost()
    for i in range(90):
        depth = (0, 1, 3)[i % 3]
        cost.learn(a_step(1.08 + 0.08 * depth + (0.5 if depth else 0.0), depth=depth))
    assert cost.step_s(8, 9) == pytest.approx(1.08 + 0.5 + 0.64, rel=0.05)
    assert cost.step_s(8, 1) == pytest.approx(1.08, rel=0.01)


def test_a_step_that_was_allowed_drafts_and_got_none_is_no_plain_step() -> None:
    cost = MeasuredCost()
    for _ in range(40):
        cost.learn(a_step(2.0))
        cost.learn(a_step(3.0, depth=4, drafted=0))
    assert cost.step_s(8, 1) == pytest.approx(2.0, rel=0.01)
    assert cost.step_s(8, 5) == pytest.approx(3.0, rel=0.01)


def test_a_depth_that_is_off_the_line_is_priced_by_its_own_steps() -> None:
    cost = MeasuredCost()
    for i in range(100):
        depth = i % 4
        cost.learn(a_step((3.0, 3.1, 9.0, 9.1)[depth], depth=depth))
    assert [cost.step_s(8, 1 + depth) for depth in range(4)] == pytest.approx([3.0, 3.1, 9.0, 9.1], rel=0.06)


def test_noise_never_makes_tokens_or_drafting_cheaper_than_nothing() -> None:
    for seed in range(10):
        rng, cost = random.Random(seed), MeasuredCost()
        for i in range(60):
            cost.learn(a_step(1.0 + rng.uniform(-0.2, 0.2), requests=1 + i % 3, depth=i % 2))
        assert cost.step_s(30, 9) >= cost.step_s(30, 1) > 0.0


def test_a_step_that_was_held_up_teaches_nothing_unless_they_all_are() -> None:
    cost = MeasuredCost()
    for i in range(60):
        depth = i % 3
        stall_s = 0.5 if i < 3 or i == 31 else 0.0  # compiling for a new shape
        cost.learn(a_step(0.01 + 0.001 * depth + stall_s, depth=depth))
    assert cost.step_s(8, 1) == pytest.approx(0.010, rel=0.03)
    assert cost.step_s(8, 2) == pytest.approx(0.011, rel=0.03)
    for _ in range(MAX_STALLS + 40):
        cost.learn(a_step(0.2, depth=1))
    assert cost.step_s(8, 2) > 0.1


def test_what_plain_steps_cost_outlives_a_long_time_with_drafts() -> None:
    cost = MeasuredCost()
    for _ in range(20):
        cost.learn(a_step(1.0))
    for i in range(500):
        cost.learn(a_step(2.0 + 0.1 * (i % 2), depth=1 + i % 2))
    assert cost.step_s(8, 1) == pytest.approx(1.0, rel=0.05)
    assert cost.step_s(8, 2) == pytest.approx(2.0, rel=0.03)
