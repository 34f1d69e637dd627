# SPDX-License-Identifier: Apache-2.0
"""The fitted step cost: a base, a cost per batched token, and a fixed extra for drafts."""

from __future__ import annotations

import pytest

from seer.speculation.step_cost import MeasuredCost
from seer.speculation.step_report import StepReport


def a_step(rows: int, seconds: float, *, drafted: int = 0, prefill: int = 0, steps: int = 1) -> StepReport:
    return StepReport(
        duration_s=seconds,
        num_steps=steps,
        num_running=4,
        num_batched_tokens=rows,
        num_prefill_tokens=prefill,
        mean_context_tokens=100,
        num_emitted=4,
        num_drafted=drafted,
        num_accepted=0,
    )


def test_the_cost_of_steps_is_learnt_and_prompts_are_left_out() -> None:
    cost = MeasuredCost()
    assert not cost.is_known
    for i in range(40):
        cost.learn(a_step(4 + i % 8, 0.1 + 0.01 * (4 + i % 8), drafted=i % 8))
        cost.learn(a_step(500, 9.0, prefill=400))
    assert cost.is_known
    assert cost.step_s(4, 1) == pytest.approx(0.14, rel=0.02)
    assert cost.step_s(4, 3) == pytest.approx(0.22, rel=0.02)
    assert cost.draft_s(4, 3) == pytest.approx(0.0, abs=1e-3)


def test_what_drafting_costs_as_such_is_not_charged_to_the_rows() -> None:
    cost = MeasuredCost()
    for i in range(60):
        drafted = 8 * (i % 3)
        cost.learn(a_step(8 + drafted, 1.0 + 0.01 * (8 + drafted) + (0.5 if drafted else 0.0), drafted=drafted))
    assert cost.draft_s(8, 1) == pytest.approx(0.5, rel=0.02)
    assert cost.draft_s(8, 0) == 0.0
    assert cost.step_s(8, 2) - cost.step_s(8, 1) == pytest.approx(0.08, rel=0.05)


def test_one_depth_alone_still_prices_that_depth() -> None:
    cost = MeasuredCost()
    for i in range(40):
        drafting = i % 2
        cost.learn(a_step(8 + 32 * drafting, 1.0 + drafting, drafted=32 * drafting))
    assert cost.step_s(8, 5) + cost.draft_s(8, 4) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("sign", [1, -1])
def test_noise_never_makes_rows_or_drafting_cheaper_than_nothing(sign: int) -> None:
    cost = MeasuredCost()
    for i in range(40):
        drafted = 8 * (i % 2)
        cost.learn(a_step(8 + drafted, 1.0 - sign * 0.01 * drafted + sign * 0.002 * (i % 5), drafted=drafted))
    assert cost.step_s(8, 4) >= cost.step_s(8, 1) > 0.0
    assert cost.draft_s(8, 4) >= 0.0


def test_a_step_that_was_held_up_teaches_nothing() -> None:
    cost = MeasuredCost()
    for i in range(60):
        drafted = 8 * (i % 3)
        stall_s = 0.5 if i % 10 == 0 else 0.0  # compiling for a new shape
        cost.learn(a_step(8 + drafted, 0.01 + 0.0001 * (8 + drafted) + stall_s, drafted=drafted))
    assert cost.step_s(8, 1) == pytest.approx(0.0108, rel=0.02)
    assert cost.step_s(8, 2) == pytest.approx(0.0116, rel=0.02)


def test_what_plain_steps_cost_outlives_a_long_time_with_drafts() -> None:
    cost = MeasuredCost()
    for _ in range(20):
        cost.learn(a_step(8, 1.0))
    for i in range(500):
        drafted = 8 + 8 * (i % 2)
        cost.learn(a_step(8 + drafted, 2.0 + 0.01 * (drafted - 8), drafted=drafted))
    assert cost.step_s(8, 1) == pytest.approx(1.0, rel=0.02)
    assert cost.step_s(8, 2) + cost.draft_s(8, 1) == pytest.approx(2.0, rel=0.02)


def test_a_report_of_eight_steps_weighs_as_much_as_eight_reports() -> None:
    cost = MeasuredCost()
    cost.learn(a_step(8, 1.0, steps=8))
    cost.learn(a_step(16, 3.0, drafted=8, steps=3))
    assert not cost.is_known
    cost.learn(a_step(16, 3.0, drafted=8, steps=2))
    assert cost.is_known
    cost.learn(a_step(16, 1.5, drafted=8, steps=5))
    cost.learn(a_step(16, 1.5, drafted=8, steps=20))
    assert cost.step_s(8, 2) + cost.draft_s(8, 1) == pytest.approx((5 * 3.0 + 25 * 1.5) / 30, rel=0.01)


class Profiled:
    """Costs that were measured earlier."""

    def __init__(self) -> None:
        self.num_asked = 0

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        self.num_asked += 1
        return 0.010 + 0.001 * num_requests * tokens_per_request

    def draft_s(self, num_requests: int, depth: float) -> float:
        return 0.002 if depth else 0.0


def test_a_profile_is_the_cost_until_enough_steps_of_both_kinds_were_seen() -> None:
    cost = MeasuredCost(Profiled())
    assert cost.is_known
    for _ in range(8):
        cost.learn(a_step(4, 0.5))
    assert cost.step_s(4, 1) == pytest.approx(0.014), "steps without drafts alone do not say what drafts cost"
    assert (cost.draft_s(4, 2), cost.draft_s(4, 0)) == (0.002, 0.0)
    for _ in range(8):
        cost.learn(a_step(12, 0.9, drafted=8))
    assert cost.step_s(4, 1) == pytest.approx(0.5, rel=0.01)


def test_a_profile_is_asked_once_for_each_shape() -> None:
    profiled = Profiled()
    cost = MeasuredCost(profiled)
    assert {cost.step_s(4, 3) for _ in range(10)} == {0.022}
    assert profiled.num_asked == 1
