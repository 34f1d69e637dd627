# SPDX-License-Identifier: Apache-2.0
"""The number of drafts per step, chosen from measured steps: simulated engines with a known best answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from seer.engine.vllm.gpu_drafts.depth import DepthBudget
from seer.engine.vllm.gpu_drafts.graphs import Shapes
from seer.speculation.throughput import MAX_DEPTH
from seer.types import BudgetRule

SHAPES = Shapes(256, 8)


def emitted(num_requests: int, depth: int, rates: Sequence[float], rng: random.Random) -> list[int]:
    """Tokens that each request gets; rates[i] is how often draft i + 1 is accepted after those before it."""
    lengths = []
    for _ in range(num_requests):
        length = 1
        while length <= depth and rng.random() < rates[length - 1]:
            length += 1
        lengths.append(length)
    return lengths


def drive(
    budget: DepthBudget,
    num_requests: int,
    num_steps: int,
    cost_s: Callable[[int, int], float],
    rates: Sequence[float],
    rng: random.Random,
) -> tuple[float, float]:
    """Seconds and tokens of so many steps."""
    total_s, num_tokens = 0.0, 0.0
    for _ in range(num_steps):
        depth = budget.choose(num_requests, "seer")
        assert SHAPES.allows(num_requests, depth)
        lengths = emitted(num_requests, depth, rates, rng)
        step_s = cost_s(num_requests, depth) * rng.uniform(0.98, 1.02)
        budget.learn(num_requests, depth, step_s, lengths)
        total_s += step_s
        num_tokens += sum(lengths)
    return total_s, num_tokens


def best_rate(num_requests: int, cost_s: Callable[[int, int], float], rates: Sequence[float]) -> float:
    """Tokens per second of the best depth, by trying every one."""
    found = 0.0
    for depth in SHAPES.depths_of(num_requests):
        reach, tokens = 1.0, 1.0
        for rate in rates[:depth]:
            reach *= rate
            tokens += reach
        found = max(found, num_requests * tokens / cost_s(num_requests, depth))
    return found


@settings(max_examples=40, deadline=None)
@given(
    num_requests=st.sampled_from([1, 5, 16, 64, 100, 256]),
    base_ms=st.floats(1.0, 6.0),
    per_token_us=st.floats(0.0, 20.0),
    rates=st.lists(st.floats(0.0, 0.95), min_size=8, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_many_steps_come_near_the_best_depth(
    num_requests: int, base_ms: float, per_token_us: float, rates: list[float], seed: int
) -> None:
    def cost_s(n: int, depth: int) -> float:
        return (base_ms + per_token_us * n * (1 + depth) / 1000) / 1000

    num_steps = 2000 if num_requests > 1 else 6000  # one request shows its acceptance slowly
    total_s, num_tokens = drive(DepthBudget(SHAPES), num_requests, num_steps, cost_s, rates, random.Random(seed))
    assert num_tokens / total_s >= 0.93 * best_rate(num_requests, cost_s, rates)


def test_where_nothing_is_accepted_drafting_costs_less_than_a_percent() -> None:
    def cost_s(n: int, depth: int) -> float:
        return 0.002 * (1 + 0.4 * depth)

    budget, rng = DepthBudget(SHAPES), random.Random(1)
    drive(budget, 64, 500, cost_s, [0.0] * 8, rng)  # what it takes to find out
    total_s, num_tokens = drive(budget, 64, 4000, cost_s, [0.0] * 8, rng)
    assert num_tokens / total_s >= 0.985 * 64 / cost_s(64, 0)


def test_a_change_of_acceptance_is_found() -> None:
    def cost_s(n: int, depth: int) -> float:
        return 0.002 * (1 + 0.1 * depth)

    budget, rng = DepthBudget(SHAPES), random.Random(2)
    drive(budget, 64, 1000, cost_s, [0.0] * 8, rng)
    assert budget.choose(64, "seer") == 0 or budget._trial[1]
    drive(budget, 64, 1000, cost_s, [0.8] * 8, rng)
    total_s, num_tokens = drive(budget, 64, 1000, cost_s, [0.8] * 8, rng)
    assert num_tokens / total_s >= 0.95 * best_rate(64, cost_s, [0.8] * 8)


def test_a_stall_does_not_turn_drafts_off() -> None:
    def cost_s(n: int, depth: int) -> float:
        return 0.002

    budget, rng = DepthBudget(SHAPES), random.Random(3)
    drive(budget, 16, 500, cost_s, [0.7] * 8, rng)
    chosen = budget.choose(16, "seer")
    assert chosen
    budget.learn(16, chosen, 1.0, [1] * 16)
    assert budget.choose(16, "seer")


def test_by_the_paper_s_rule_no_depth_beyond_its_most_is_chosen_or_tried() -> None:
    deepest: dict[BudgetRule, int] = {}
    rules: tuple[BudgetRule, ...] = ("seer", "paper")
    for rule in rules:
        budget, chosen = DepthBudget(Shapes(16, 16)), []
        for _ in range(2000):
            chosen.append(budget.choose(1, rule))
            budget.learn(1, chosen[-1], 0.002 * (1 + 0.001 * chosen[-1]), [1 + chosen[-1]])  # all are accepted
        deepest[rule] = max(chosen)
        assert chosen.count(deepest[rule]) > len(chosen) / 2
    assert deepest == {"seer": 16, "paper": MAX_DEPTH}
