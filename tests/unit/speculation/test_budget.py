# SPDX-License-Identifier: Apache-2.0
"""The budget: sizes of drafts by each rule, in cases that can be computed by hand."""

from __future__ import annotations

import weakref

import pytest

from seer.speculation.budget import allot
from seer.speculation.paper import Depths, share_out
from seer.speculation.threshold import Thresholds
from seer.speculation.throughput import (
    Acceptance,
    BatchClass,
    DraftLimits,
    DraftSize,
    geometric_survival,
    linear,
    tokens_per_s,
)
from seer.types import BudgetRule

LINES = DraftLimits()


class Cost:
    """A step takes 1 s for up to so many tokens, and then 1 s for each further token."""

    def __init__(self, free_tokens: int) -> None:
        self._free_tokens = free_tokens

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        return 1.0 + max(0.0, num_requests * tokens_per_request - self._free_tokens)

    def draft_s(self, num_requests: int, depth: float) -> float:
        return 0.0


def a_batch(num_probes: int, num_others: int, acceptance: float = 0.5) -> list[BatchClass]:
    accepted = linear(geometric_survival(acceptance))
    return [BatchClass(num_probes, accepted, is_probe=True), BatchClass(num_others, accepted)]


def test_a_budget_of_one_token_each_is_not_given_to_the_probes_alone() -> None:
    batch, cost = a_batch(10, 90), Cost(free_tokens=200)
    sizes = allot("seer", cost, batch, LINES)
    assert sizes == [DraftSize(1), DraftSize(1)]
    assert tokens_per_s(cost, batch, sizes) == pytest.approx(1.5 * 100)


def test_drafts_go_to_the_class_that_accepts_more() -> None:
    known, unknown = linear(geometric_survival(0.8)), linear(geometric_survival(0.1))
    batch = [BatchClass(10, known), BatchClass(10, unknown)]
    assert allot("seer", Cost(free_tokens=50), batch, LINES) == [DraftSize(3), DraftSize(0)]


def test_drafts_stop_where_a_step_gets_slower() -> None:
    sizes = [allot("seer", Cost(free_tokens=64), a_batch(0, num), LINES)[1].tokens for num in (64, 32, 16, 8)]
    assert sizes == [0, 1, 3, 7]


def test_more_paths_are_drafted_where_they_gain_more() -> None:
    wide = Acceptance({1: [1, 0.5, 0.1, 0.1, 0.1], 2: [1, 0.4, 0.3, 0.3, 0.3]})
    limits = DraftLimits(tuple(range(5)), max_paths=2)
    assert allot("seer", Cost(free_tokens=5), [BatchClass(1, wide)], limits) == [DraftSize(4, 2)]
    assert allot("seer", Cost(free_tokens=2), [BatchClass(1, wide)], limits) == [DraftSize(1, 1)]
    assert allot("seer", Cost(free_tokens=5), [BatchClass(1, wide)], DraftLimits()) == [DraftSize(4, 1)]


def test_probes_and_others_that_were_only_measured_with_several_paths_get_a_budget() -> None:
    measured = Acceptance({4: [1, 0.5, 0.3]})
    batch = [BatchClass(2, measured, is_probe=True), BatchClass(3, measured)]
    sizes = allot("seer", Cost(free_tokens=20), batch, DraftLimits(tuple(range(3)), max_paths=4))
    assert [size.tokens for size in sizes] == [2, 2]


def test_a_second_path_that_pays_only_with_many_tokens_does_not_hide_what_others_gain() -> None:
    forked = Acceptance({1: [1, 0.5, 0, 0, 0], 2: [1, 0.3, 0.3, 0.3, 0.3]})
    batch = [BatchClass(1, forked), BatchClass(1, linear([1, 0.25, 0.25, 0.25, 0.25]))]
    limits = DraftLimits(tuple(range(5)), max_paths=2)
    assert allot("seer", Cost(free_tokens=7), batch, limits) == [DraftSize(1, 1), DraftSize(4, 1)]


def test_where_steps_are_padded_every_request_drafts_as_much() -> None:
    batch = [BatchClass(10, linear(geometric_survival(a))) for a in (0.8, 0.1)]
    limits = DraftLimits((0, 1, 3), is_uniform=True)
    assert allot("seer", Cost(free_tokens=50), batch, limits) == [DraftSize(1), DraftSize(1)]


def test_of_equal_sizes_the_smallest_is_chosen() -> None:
    assert allot("seer", Cost(free_tokens=99), a_batch(1, 1, acceptance=0.0), LINES) == [DraftSize(0)] * 2


@pytest.mark.parametrize("rule", ["seer", "paper", "threshold"])
def test_an_empty_batch_drafts_nothing(rule: BudgetRule) -> None:
    assert allot(rule, Cost(free_tokens=99), a_batch(0, 0), LINES) == [DraftSize(0)] * 2


def test_the_papers_rule_gives_others_more_than_probes() -> None:
    beta = geometric_survival(0.6, 9)
    assert share_out(10, 50, beta, 4 * 60) == Depths(1, 4)
    assert share_out(0, 50, beta, 4 * 50) == Depths(0, 4)
    assert share_out(10, 0, beta, 4 * 10) == Depths(4, 0)
    assert share_out(10, 50, beta, 9) == Depths(0, 0)


def test_without_others_the_papers_rule_gives_probes_the_best_depth_at_most() -> None:
    assert share_out(10, 0, [1.0] * 9, 4 * 10) == Depths(4, 0), "also where no token loses acceptance"
    assert share_out(10, 0, geometric_survival(0.6), 100 * 10) == Depths(8, 0)


def test_the_papers_answer_is_taken_where_it_gains_more() -> None:
    class Cliff:
        """A step with more than 110 draft tokens for 60 requests takes 4% longer."""

        def step_s(self, num_requests: int, tokens_per_request: float) -> float:
            return 1.0 if round(num_requests * (tokens_per_request - 1)) <= 110 else 1.04

        def draft_s(self, num_requests: int, depth: float) -> float:
            return 0.0

    batch, cost = a_batch(10, 50, acceptance=0.6), Cliff()
    limits = DraftLimits(tuple(range(3)))
    assert allot("paper", cost, batch, limits) == [DraftSize(1), DraftSize(2)]
    assert allot("seer", cost, batch, limits) == [DraftSize(1), DraftSize(2)]


def test_the_papers_rule_shares_out_the_best_depth_of_the_whole_batch() -> None:
    assert allot("paper", Cost(free_tokens=100), a_batch(5, 20), LINES) == [DraftSize(1), DraftSize(3)]
    assert allot("paper", Cost(free_tokens=25), a_batch(5, 20), LINES) == [DraftSize(0), DraftSize(0)]


def test_fixed_limits_depend_on_the_size_of_the_batch_only() -> None:
    def depth(num_requests: int) -> int:
        batch = a_batch(0, num_requests, acceptance=0.0)
        return allot("threshold", Cost(1), batch, LINES, thresholds=Thresholds(6, 64))[1].tokens

    assert [depth(num_requests) for num_requests in (1, 10, 11, 32, 64, 65)] == [6, 6, 5, 2, 1, 0]


def test_what_was_computed_from_an_acceptance_goes_with_it() -> None:
    """An engine measures another one every few steps, for as long as it runs."""
    classes = a_batch(2, 6)
    acceptance = weakref.ref(classes[0].acceptance)
    allot("seer", Cost(free_tokens=64), classes, LINES)
    assert acceptance() is not None
    classes.clear()
    assert acceptance() is None
