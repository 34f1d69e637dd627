# SPDX-License-Identifier: Apache-2.0
"""The budget's rules over random batches, costs and acceptance, against brute force and against the paper's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from seer.speculation.budget import allot
from seer.speculation.paper import Depths, share_out
from seer.speculation.threshold import Thresholds
from seer.speculation.throughput import Acceptance, BatchClass, DraftLimits, DraftSize

BY_ROUNDING = 1.0 - 1e-9


@dataclass(frozen=True)
class Cost:
    """A fixed part, a part per token, a part that tokens share until they no longer fit, a part for any drafts."""

    fixed_s: float
    token_s: float
    shared_s: float
    knee_tokens: int
    drafts_s: float

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        num_tokens = num_requests * tokens_per_request
        reached: float = 1.0 - (1.0 - 1.0 / self.knee_tokens) ** num_tokens  # as the experts that a batch reads
        return self.fixed_s + self.token_s * max(0.0, num_tokens - self.knee_tokens) + self.shared_s * reached

    def draft_s(self, num_requests: int, depth: float) -> float:
        return self.drafts_s if depth else 0.0


@dataclass(frozen=True)
class AffineCost:
    """Seconds that grow by the same with every token, and a part for any drafts."""

    fixed_s: float
    token_s: float
    drafts_s: float

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        return self.fixed_s + self.token_s * num_requests * tokens_per_request

    def draft_s(self, num_requests: int, depth: float) -> float:
        return self.drafts_s if depth else 0.0


def falling(num_tokens: int) -> st.SearchStrategy[list[float]]:
    shares = st.floats(0.0, 1.0, allow_subnormal=False)
    return st.lists(shares, min_size=num_tokens, max_size=num_tokens).map(
        lambda found: [1.0, *sorted(found, reverse=True)]
    )


small = st.floats(0.0, 0.02)
costs = st.builds(Cost, st.floats(0.001, 0.1), small, small, st.integers(2, 300), small)
affine_costs = st.builds(AffineCost, st.floats(0.001, 0.1), small, small)
trees = st.builds(lambda one, two, four: Acceptance({1: one, 2: two, 4: four}), falling(8), falling(8), falling(8))
batches = st.lists(st.builds(BatchClass, st.integers(1, 60), trees, st.booleans()), min_size=1, max_size=3)
limits = st.builds(
    DraftLimits,
    st.sets(st.integers(1, 8)).map(lambda choices: (0, *sorted(choices))),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)


def rate(cost: Cost | AffineCost, batch: Sequence[BatchClass], sizes: Sequence[DraftSize]) -> float:
    """Tokens per second, from the definition."""
    num_requests = sum(one.num_requests for one in batch)
    drafted = sum(one.num_requests * size.tokens for one, size in zip(batch, sizes, strict=True))
    gained = sum(
        one.num_requests * sum(one.acceptance.by_paths[size.paths][: size.tokens + 1])
        for one, size in zip(batch, sizes, strict=True)
    )
    depth = drafted / num_requests
    return gained / (cost.step_s(num_requests, 1 + depth) + cost.draft_s(num_requests, depth))


@given(costs, batches, limits)
def test_no_uniform_depth_gains_more_than_the_rule_seer(
    cost: Cost, batch: list[BatchClass], limits: DraftLimits
) -> None:
    ours = rate(cost, batch, allot("seer", cost, batch, limits))
    for tokens in limits.choices:
        for paths in (paths for paths in (1, 2, 4) if paths <= limits.max_paths):
            assert ours >= rate(cost, batch, [DraftSize(tokens, paths)] * len(batch)) * BY_ROUNDING, (tokens, paths)


@given(costs, batches, st.integers(0, 8), st.integers(0, 400))
def test_no_other_rule_gains_more_than_the_rule_seer(
    cost: Cost, batch: list[BatchClass], per_request: int, per_batch: int
) -> None:
    limits, thresholds = DraftLimits(max_paths=4), Thresholds(per_request, per_batch)
    ours = rate(cost, batch, allot("seer", cost, batch, limits))
    assert ours >= rate(cost, batch, allot("paper", cost, batch, limits)) * BY_ROUNDING
    theirs = allot("threshold", cost, batch, limits, thresholds=thresholds)
    assert ours >= rate(cost, batch, theirs) * BY_ROUNDING


small_trees = st.builds(lambda one, two: Acceptance({1: one, 2: two}), falling(4), falling(4))


@given(
    affine_costs,
    st.lists(st.builds(BatchClass, st.integers(1, 60), small_trees, st.booleans()), min_size=1, max_size=2),
)
def test_where_tokens_cost_alike_the_rule_seer_finds_the_best_of_all_sizes(
    cost: AffineCost, batch: list[BatchClass]
) -> None:
    limits = DraftLimits(tuple(range(5)), max_paths=2)
    sizes = [DraftSize(tokens, paths) for tokens in limits.choices for paths in (1, 2)]
    every = product(sizes, repeat=len(batch))
    best = max(rate(cost, batch, sizes) for sizes in every)
    assert rate(cost, batch, allot("seer", cost, batch, limits)) >= best * BY_ROUNDING


@given(costs, batches, limits)
def test_sizes_are_within_the_limits(cost: Cost, batch: list[BatchClass], limits: DraftLimits) -> None:
    for size in allot("paper", cost, batch, limits):
        assert size.tokens in limits.choices
    sizes = allot("seer", cost, batch, limits)
    assert all(size.tokens in limits.choices for size in sizes)
    assert all(size.paths <= limits.max_paths for size in sizes)
    assert not limits.is_uniform or len({size.tokens for size in sizes}) == 1


def printed(num_high: int, num_low: int, beta: Sequence[float], budget: int) -> Depths:
    """Algorithm 1 line by line, for batches that have both classes; beyond γ_max acceptance stays as it is."""
    beta = [*beta[:9], beta[8]]
    if budget < num_high:
        return Depths(0, 0)
    high, low, left = 1, 0, budget - num_high
    while left > 0:
        benefit_high = num_high * (beta[high] - beta[high + 1])
        benefit_low = num_low * (beta[low] - beta[low + 1])
        if benefit_high > 2 * benefit_low and high < 8 and left >= num_high:
            high, left = high + 1, left - num_high
        elif num_low > 0 and low < 8 and left >= num_low:
            low, left = low + 1, left - num_low
        else:
            break
    return Depths(high, low)


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from([8, 16]).flatmap(falling), st.integers(0, 1000))
def test_the_papers_rule_is_the_printed_one(
    num_probes: int, num_others: int, beta: list[float], budget_tokens: int
) -> None:
    assert share_out(num_probes, num_others, beta, budget_tokens) == printed(
        num_probes, num_others, beta, budget_tokens
    )
