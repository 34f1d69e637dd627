# SPDX-License-Identifier: Apache-2.0
"""Move or recompute: the decision is never worse than either extreme, nor than any split between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.errors import ConfigError
from seer.transfer import (
    Gap,
    MoveCost,
    PrefillCost,
    TransferCosts,
    TransferEstimate,
    fit_move_cost,
    plan_transfer,
)

FAST_LINK = MoveCost(latency_s=1e-4, bandwidth_bytes_s=50e9)
SLOW_LINK = MoveCost(latency_s=1e-2, bandwidth_bytes_s=1e8)
PREFILL = PrefillCost(fixed_s=2e-3, per_token_s=2e-5, per_token_pair_s=1e-9)


def a_gap(num_tokens: int = 8192, *, first: int = 0, pooled: int | None = None, bytes_per_token: int = 131072) -> Gap:
    pooled = num_tokens if pooled is None else pooled
    return Gap(
        first_token=first,
        num_tokens=num_tokens,
        num_pooled_tokens=pooled,
        bytes_per_token=bytes_per_token,
        block_size=64,
    )


def test_a_long_prefix_over_a_fast_link_is_moved() -> None:
    plan = plan_transfer(a_gap(), FAST_LINK, PREFILL)
    assert (plan.move_tokens, plan.compute_tokens) == (8192, 0)


def test_a_long_prefix_over_a_slow_link_is_computed() -> None:
    plan = plan_transfer(a_gap(), SLOW_LINK, PREFILL)
    assert (plan.move_tokens, plan.compute_tokens) == (0, 8192)


def test_a_short_gap_is_not_worth_the_delay_of_a_transfer() -> None:
    cheap = PrefillCost(fixed_s=0.0, per_token_s=1e-5)
    assert plan_transfer(a_gap(64), MoveCost(latency_s=5e-3, bandwidth_bytes_s=50e9), cheap).move_tokens == 0


def test_what_the_pool_does_not_hold_is_computed() -> None:
    plan = plan_transfer(a_gap(1000, pooled=0), FAST_LINK, PREFILL)
    assert (plan.move_tokens, plan.compute_tokens) == (0, 1000)
    plan = plan_transfer(a_gap(1000, pooled=700), FAST_LINK, PREFILL)
    assert (plan.move_tokens, plan.compute_tokens) == (640, 360), "whole blocks only"


def test_no_gap_costs_nothing() -> None:
    assert plan_transfer(a_gap(0), FAST_LINK, PREFILL).seconds == 0.0


@given(
    num=st.integers(0, 4000),
    first=st.integers(0, 4000),
    pooled=st.integers(0, 5000),
    latency=st.floats(0, 0.1),
    bandwidth=st.floats(1e6, 1e12),
    fixed=st.floats(0, 0.1),
    per_token=st.floats(0, 1e-3),
    per_pair=st.floats(0, 1e-7),
)
def test_no_split_at_a_block_is_better(
    num: int,
    first: int,
    pooled: int,
    latency: float,
    bandwidth: float,
    fixed: float,
    per_token: float,
    per_pair: float,
) -> None:
    gap = a_gap(num, first=first, pooled=pooled)
    move = MoveCost(latency_s=latency, bandwidth_bytes_s=bandwidth)
    prefill = PrefillCost(fixed_s=fixed, per_token_s=per_token, per_token_pair_s=per_pair)
    plan = plan_transfer(gap, move, prefill)
    assert plan.move_tokens + plan.compute_tokens == num
    assert plan.move_tokens <= pooled
    for split in range(0, min(num, pooled) + 1, gap.block_size):
        cost = move.seconds(split * gap.bytes_per_token) + prefill.seconds(first + split, num - split)
        assert plan.seconds <= cost * (1 + 1e-9) + 1e-12


def test_a_line_is_fitted_through_measured_transfers() -> None:
    sizes = [1 << 20, 2 << 20, 8 << 20, 16 << 20]
    cost = fit_move_cost(sizes, [1e-3 + s / 5e9 for s in sizes])
    assert cost.latency_s == pytest.approx(1e-3, rel=0.01)
    assert cost.bandwidth_bytes_s == pytest.approx(5e9, rel=0.01)


def test_noise_without_a_slope_becomes_bandwidth_alone() -> None:
    cost = fit_move_cost([1 << 20, 2 << 20], [2e-3, 1e-3])
    assert cost.latency_s == 0.0
    assert cost.bandwidth_bytes_s == pytest.approx((2 << 20) / 1e-3)


def test_sizes_that_are_close_never_predict_more_than_was_measured() -> None:
    sizes, seconds = [5_898_240, 6_635_520, 5_898_240, 5_160_960], [0.0097, 0.0147, 0.0024, 0.0017]
    cost = fit_move_cost(sizes, seconds)
    assert cost.seconds(max(sizes)) <= max(seconds)


def test_impossible_costs_are_refused() -> None:
    with pytest.raises(ConfigError):
        MoveCost(latency_s=0, bandwidth_bytes_s=0)
    with pytest.raises(ConfigError):
        PrefillCost(fixed_s=-1, per_token_s=0)
    with pytest.raises(ConfigError, match="at least 2"):
        fit_move_cost([1, 1], [1.0, 1.0])


def test_an_estimate_keeps_the_given_costs_until_it_has_seen_enough() -> None:
    given_costs = TransferCosts(move=FAST_LINK, prefill=PREFILL)
    estimate = TransferEstimate(given_costs)
    estimate.saw_move(1 << 20, 0.0)  # nothing was measured
    for _ in range(TransferEstimate.MIN_MOVES - 1):
        estimate.saw_move(1 << 20, 1e-3)
    estimate.saw_prefill(TransferEstimate.MIN_PREFILL_TOKENS - 1, 1.0)
    assert estimate.costs == given_costs


def test_an_estimate_follows_what_it_saw() -> None:
    estimate = TransferEstimate(TransferCosts(move=FAST_LINK, prefill=PREFILL))
    for size in (1 << 20, 1 << 20, 8 << 20, 8 << 20):
        estimate.saw_move(size, 1e-3 + size / 1e9)
    estimate.saw_prefill(1000, 2.0)
    assert estimate.costs.move.latency_s == pytest.approx(1e-3)
    assert estimate.costs.move.bandwidth_bytes_s == pytest.approx(1e9)
    assert estimate.costs.prefill.seconds(0, 500) == pytest.approx(1.0)
    for _ in range(100):
        estimate.saw_prefill(1000, 4.0)  # the machine has become slower
    assert estimate.costs.prefill.seconds(0, 500) == pytest.approx(2.0, rel=1e-3)


def test_slow_moves_are_forgotten_when_nothing_has_moved_for_long() -> None:
    estimate = TransferEstimate(TransferCosts(move=FAST_LINK, prefill=PREFILL))
    for _ in range(TransferEstimate.MIN_MOVES):
        estimate.saw_move(1 << 20, 10.0)
    for _ in range(TransferEstimate.FORGET_AFTER - 1):
        estimate.saw_prefill(1000, 2.0)
        assert estimate.costs.move != FAST_LINK
    estimate.saw_prefill(1000, 2.0)
    assert estimate.costs.move == FAST_LINK
    for _ in range(TransferEstimate.MIN_MOVES):
        estimate.saw_move(1 << 20, 10.0)
    assert estimate.costs.move.seconds(1 << 20) == pytest.approx(10.0)


def test_transfers_of_one_size_tell_a_bandwidth() -> None:
    estimate = TransferEstimate()
    for _ in range(TransferEstimate.MIN_MOVES):
        estimate.saw_move(1 << 20, 1e-3)
    estimate.saw_prefill(1000, 2.0)
    assert estimate.costs.move.seconds(1 << 20) == pytest.approx(1e-3)


def test_a_measured_cost_is_not_compared_with_a_guess() -> None:
    given_costs = TransferCosts(move=FAST_LINK, prefill=PREFILL)
    moves, prefills = TransferEstimate(given_costs), TransferEstimate(given_costs)
    for size in (1 << 20, 1 << 20, 8 << 20, 8 << 20):
        moves.saw_move(size, 1.0 + size / 1e6)  # slow, but the prefill of this machine may be slower still
    prefills.saw_prefill(1000, 2.0)
    assert moves.costs == prefills.costs == given_costs
