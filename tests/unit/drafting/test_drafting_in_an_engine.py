# SPDX-License-Identifier: Apache-2.0
"""Drafts inside an instance's process: whose words are drafted from, and when drafting pays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("seer.drafting._index")

from seer.drafting import live_budget
from seer.drafting.base import Allowance, DraftAsk, RunningBatch
from seer.drafting.client import DraftClient
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.drafting.ids import number_of
from seer.drafting.live_budget import REVIEW_STEPS, TREES, TRIAL_TOKENS, MeasuredBudget
from seer.speculation.budget import allot
from seer.speculation.step_report import StepReport
from seer.speculation.throughput import DraftLimits
from seer.types import DraftMode

FOUR = RunningBatch(4)
SENTENCE = [11, 12, 13, 14, 15, 16, 17, 18]


@pytest.fixture
def drafter() -> Iterator[GroupedDrafter]:
    made = GroupedDrafter((), None)
    yield made
    made.close()


def drafted(drafter: GroupedDrafter, group: int, request: int, so_far: list[int], most: int = 4) -> list[int]:
    ask = DraftAsk(group, request, [1, *so_far], 1, most)
    (tree,) = drafter.draft([ask])
    return list(tree.tokens)


def begin(drafter: GroupedDrafter, mode: DraftMode, run: str = "a") -> None:
    drafter.begin_run(run, mode, 0)


def test_a_sibling_s_words_are_drafted_in_a_group_only(drafter: GroupedDrafter) -> None:
    for mode, expected in (("grouped", SENTENCE[3:7]), ("own", [])):
        begin(drafter, mode)  # type: ignore[arg-type]
        drafter.observe(5, 0, SENTENCE, start=0)
        drafter.observe(5, 1, SENTENCE[:3], start=0)
        drafter.observe(6, 2, SENTENCE[:3], start=0)
        assert drafted(drafter, 5, 1, SENTENCE[:3]) == expected
        assert drafted(drafter, 6, 2, SENTENCE[:3]) == []


def test_plain_speculation_drafts_a_request_s_own_repetition(drafter: GroupedDrafter) -> None:
    begin(drafter, "own")
    drafter.observe(5, 0, [*SENTENCE, *SENTENCE[:3]], start=0)
    assert drafted(drafter, 5, 0, [*SENTENCE, *SENTENCE[:3]]) == SENTENCE[3:7]


def test_another_run_s_words_are_unknown_and_off_is_off(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped", "a")
    drafter.observe(5, 0, SENTENCE, start=0)
    begin(drafter, "grouped", "b")
    drafter.observe(5, 1, SENTENCE[:3], start=0)
    assert drafted(drafter, 5, 1, SENTENCE[:3]) == []
    begin(drafter, "none", "c")
    drafter.observe(5, 0, SENTENCE, start=0)
    drafter.observe(5, 1, SENTENCE[:3], start=0)
    assert drafted(drafter, 5, 1, SENTENCE[:3]) == []


def test_words_of_an_earlier_weights_version_are_drafted_by_their_group_and_their_run_only(
    drafter: GroupedDrafter,
) -> None:
    begin(drafter, "grouped", "a")
    drafter.seed_from({5: [SENTENCE]})
    drafter.observe(5, 1, SENTENCE[:3], start=0)
    drafter.observe(6, 2, SENTENCE[:3], start=0)
    assert drafted(drafter, 5, 1, SENTENCE[:3]) == SENTENCE[3:7]
    assert drafted(drafter, 6, 2, SENTENCE[:3]) == []
    begin(drafter, "grouped", "b")
    drafter.observe(5, 1, SENTENCE[:3], start=0)
    assert drafted(drafter, 5, 1, SENTENCE[:3]) == []


def test_what_is_held_back_is_learned_before_the_next_draft_and_when_its_request_leaves(
    drafter: GroupedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    learn = DraftClient.observe_batch

    def counted(client: DraftClient, requests: Any, *args: Any, **rest: Any) -> None:
        batches.append(len(requests))
        learn(client, requests, *args, **rest)

    monkeypatch.setattr(DraftClient, "observe_batch", counted)
    monkeypatch.setattr("seer.drafting.grouped_drafter.HOLD_S", 1e9)
    begin(drafter, "grouped")
    for at, token in enumerate(SENTENCE):
        drafter.observe(5, 0, [token], start=at)
        if at < 3:
            drafter.observe(5, 1, [token], start=at)
    assert batches == []
    assert drafted(drafter, 5, 1, SENTENCE[:3]) == SENTENCE[3:7]
    assert batches == [2]
    drafter.observe(6, 2, SENTENCE, start=0)
    drafter.forget(2)
    assert batches == [2, 1]
    # One that was elsewhere comes back further on: what is between is not known here, what it says next is.
    drafter.observe(6, 3, SENTENCE[:2], start=0)
    drafter.observe(6, 3, SENTENCE[4:7], start=4)
    assert batches == [2, 1, 1]
    assert drafted(drafter, 6, 3, SENTENCE[:7]) == SENTENCE[7:]


def test_while_the_engine_steps_nothing_is_held_back_for_long(
    drafter: GroupedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    monkeypatch.setattr(
        DraftClient, "observe_batch", lambda client, requests, *_, **rest: batches.append(len(requests))
    )
    clock_s = iter([10.0, 10.05, 10.101, 10.15])
    monkeypatch.setattr("seer.drafting.grouped_drafter.time.perf_counter", lambda: next(clock_s))
    begin(drafter, "grouped")
    for at in range(4):
        drafter.observe(5, 0, [7], start=at)
    assert batches == [1]  # with the third; the fourth begins anew


def test_acceptance_is_what_followed_the_draft(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped")
    drafter.observe(5, 0, SENTENCE, start=0)
    drafter.observe(5, 1, SENTENCE[:3], start=0)
    before = drafter.acceptance.survival()
    assert drafted(drafter, 5, 1, SENTENCE[:3]) == SENTENCE[3:7]
    drafter.observe(5, 1, [SENTENCE[3], SENTENCE[4], 99], start=3)
    after = drafter.acceptance.survival()
    assert after[1] > before[1]
    assert after[2] / after[1] > before[2] / before[1]
    assert after[3] / after[2] < after[2] / after[1]  # the third was tried and refused


def test_followed_requests_are_drafted_for_as_those_that_are_asked_for_one_by_one(drafter: GroupedDrafter) -> None:
    asked, dice = GroupedDrafter((), None), random.Random(4)
    generated = {request: [dice.randrange(6) for _ in range(60)] for request in range(4)}
    for one in (drafter, asked):
        begin(one, "grouped")
        one.observe(5, 9, generated[0], start=0)
        for request in generated:
            one.observe(5 + request // 2, request, generated[request][:3], start=0)
    asks = [DraftAsk(5 + request // 2, request, [], 0, 4, 2) for request in generated]
    session = drafter.open_session(asks)
    at = 3
    while at < 60:
        limits = np.array([4, 0, 3, 4], np.int32)
        table = session.draft(limits)
        trees = asked.draft([replace(ask, max_tokens=int(most)) for ask, most in zip(asks, limits, strict=True)])
        for row, tree in enumerate(trees):
            count = table.counts[row]
            assert table.tokens[row, :count].tolist() == list(tree.tokens)
            assert table.parents[row, :count].tolist() == [-1 if one is None else one for one in tree.parents]
        step = dice.randrange(1, 4)
        new = {request: tokens[at : at + step] if request != 2 else [] for request, tokens in generated.items()}
        session.observe(
            np.array([token for tokens in new.values() for token in tokens], np.int32),
            np.cumsum([0, *map(len, new.values())], dtype=np.int64),
        )
        for request, tokens in new.items():
            if tokens:
                asked.observe(5 + request // 2, request, tokens, start=at)
        at += step
    before = drafter.acceptance.survival()
    session.close([100, 60], [60, 30])
    assert drafter.acceptance.survival()[1] > before[1]
    # Afterwards it goes on as if it had been asked all along.
    for one in (drafter, asked):
        one.observe(5, 0, [1, 2], start=60)
    assert drafted(drafter, 5, 0, []) == drafted(asked, 5, 0, [])
    asked.close()


def test_a_followed_request_that_is_generated_anew_goes_on_under_another_number(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped")
    drafter.observe(5, 0, SENTENCE, start=0)
    drafter.observe(5, 1, SENTENCE[:2], start=0)
    session = drafter.open_session([DraftAsk(5, 1, [], 0, 4)])
    # What came from a sibling's instance under this request's name: tokens of a life that was lost.
    client = drafter._client
    client.index.append_one(number_of("run/5"), number_of("run/1"), [77, 78], previous_count=2)
    session.observe(np.array(SENTENCE[2:4], np.int32), np.array([0, 2], np.int64))
    table = session.draft(np.array([4], np.int32))
    assert table.tokens[0, : table.counts[0]].tolist() == SENTENCE[4:]
    session.close([0], [0])


def a_step(rows: int, seconds: float, *, running: int = 4, prefill: int = 0) -> StepReport:
    return StepReport(
        duration_s=seconds,
        num_steps=1,
        num_running=running,
        num_batched_tokens=rows,
        num_prefill_tokens=prefill,
        mean_context_tokens=100,
        num_emitted=running,
        num_drafted=rows - running,
        num_accepted=0,
    )


def a_budget(drafter: GroupedDrafter, base_s: float, slope_s: float, *, max_paths: int = 1) -> MeasuredBudget:
    begin(drafter, "grouped")
    budget = MeasuredBudget(drafter, DraftLimits(tuple(range(9)), max_paths))
    for i in range(40):
        rows = 4 + i % 8
        budget.on_step(a_step(rows, base_s + slope_s * rows))
    return budget


def make_steps(budget: MeasuredBudget, count: int, base_s: float, slope_s: float) -> list[Allowance]:
    """Ask and step as an engine does that makes one step at a time."""
    asked: list[Allowance] = []
    for _ in range(count):
        asked.append(budget(FOUR))
        rows = 4 * (1 + asked[-1].max_tokens)
        budget.on_step(a_step(rows, base_s + slope_s * rows))
    return asked


def test_where_rows_are_free_it_drafts(drafter: GroupedDrafter) -> None:
    assert a_budget(drafter, 0.1, 0.0)(FOUR).max_tokens > TRIAL_TOKENS


def test_where_rows_cost_a_step_it_tries_rarer_and_rarer(drafter: GroupedDrafter) -> None:
    asked = make_steps(a_budget(drafter, 0.0, 0.1), 2000, 0.0, 0.1)
    assert {one.max_tokens for one in asked} == {0, TRIAL_TOKENS}
    trials = [step for step, one in enumerate(asked) if one.max_tokens]
    gaps = [later - earlier - 1 for earlier, later in pairwise(trials)]
    # A trial step of two tokens takes three times as long: two hundred others make that a hundredth, for each of two.
    assert gaps[:6] == [16, 32, 64, 128, 256, 400]
    assert set(gaps[6:]) == {400}


def test_as_long_as_costs_are_unknown_steps_with_and_without_drafts_take_turns(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped")
    budget = MeasuredBudget(drafter)
    asked = make_steps(budget, 8, 0.1, 0.001)
    assert asked == [Allowance(0), Allowance(TRIAL_TOKENS, max_steps=2)] * 4
    assert budget(FOUR).max_steps is None  # now it is known to pay


class Profile:
    """Costs of steps, measured before this run."""

    def __init__(self, base_s: float, slope_s: float) -> None:
        self._base_s, self._slope_s = base_s, slope_s

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        return self._base_s + self._slope_s * num_requests * tokens_per_request

    def draft_s(self, num_requests: int, depth: float) -> float:
        return 0.0


def test_with_a_profile_the_very_first_step_drafts_where_that_pays(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped")
    assert MeasuredBudget(drafter, start=Profile(0.1, 0.0))(FOUR).max_tokens > TRIAL_TOKENS
    assert MeasuredBudget(drafter, start=Profile(0.0, 0.1))(FOUR).max_tokens == 0


def test_a_trial_that_had_nothing_to_draft_costs_no_patience(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped")
    budget = MeasuredBudget(drafter)
    for _ in range(100):
        budget(FOUR)
        budget.on_step(a_step(4, 0.1))
    asked = make_steps(budget, 12, 0.1, 0.001)
    assert sum(one.max_tokens > 0 for one in asked) >= 4


def test_a_step_that_captured_a_graph_prices_no_other(drafter: GroupedDrafter) -> None:
    budget = a_budget(drafter, 0.1, 0.0)
    for _ in range(200):
        budget.on_step(replace(a_step(12, 5.0), has_captured=True))
    assert budget(FOUR).max_tokens > TRIAL_TOKENS


def test_a_budget_for_trees_lets_every_draft_fork_and_one_for_lines_none(drafter: GroupedDrafter) -> None:
    for max_paths in (1, 2):
        cheap, dear = (
            a_budget(drafter, 0.1, 0.0, max_paths=max_paths),
            a_budget(drafter, 0.0, 0.1, max_paths=max_paths),
        )
        trial = next(one for one in make_steps(dear, 40, 0.0, 0.1) if one.max_tokens)
        assert trial.max_paths == cheap(FOUR).max_paths == max_paths


def test_with_speculation_off_nothing_is_asked_for(drafter: GroupedDrafter) -> None:
    budget = MeasuredBudget(drafter)
    assert budget(FOUR).max_tokens == 0


def with_costs(budget: MeasuredBudget, base_s: float, slope_s: float) -> MeasuredBudget:
    for i in range(40):
        budget.on_step(a_step(4 + i % 8, base_s + slope_s * (4 + i % 8)))
    return budget


def test_drafts_grow_to_sixteen_tokens_on_four_paths_where_few_requests_run(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped")
    drafter.acceptance.observe_many([1000] * 16, [900 - 50 * node for node in range(16)])
    budget = with_costs(MeasuredBudget(drafter, TREES), 0.1, 0.001)
    sizes = {num_running: budget(RunningBatch(num_running)) for num_running in (1, 16, 64, 256)}
    assert (sizes[1].max_tokens, sizes[1].max_paths) == (16, 4)
    assert 16 >= sizes[16].max_tokens > sizes[64].max_tokens >= sizes[256].max_tokens


def test_a_tree_is_counted_where_its_accepted_nodes_are(
    drafter: GroupedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(drafter, "grouped")
    for sibling, word in enumerate((13, 13, 14)):
        drafter.observe(5, sibling, [11, 12, word, 15], start=0)
    drafter.observe(5, 9, [11, 12], start=0)
    (tree,) = drafter.draft([DraftAsk(5, 9, [1, 11, 12], 1, 4, max_paths=2)])
    assert tree.tokens[0] == 13
    second = list(tree.tokens).index(14)
    counted: list[Any] = []
    monkeypatch.setattr(drafter.acceptance, "observe", lambda allowed, nodes: counted.append((allowed, list(nodes))))
    drafter.observe(5, 9, [14, 99], start=2)
    assert counted == [(4, [second])]


def test_the_papers_mode_drafts_by_the_papers_rule_on_one_path(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped-paper")
    drafter.acceptance.observe_many([1000] * 8, [round(1000 * 0.6 ** (1 + node)) for node in range(8)])
    allowance = with_costs(MeasuredBudget(drafter, TREES), 0.1, 0.0005)(RunningBatch(60, 10))
    assert allowance.max_paths == 1
    assert (allowance.tokens_for(is_probe=True), allowance.tokens_for(is_probe=False)) == (1, 2)
    plain = with_costs(MeasuredBudget(drafter, TREES), 0.1, 0.0005)
    begin(drafter, "own")
    drafter.acceptance.observe_many([1000] * 8, [round(1000 * 0.6 ** (1 + node)) for node in range(8)])
    assert plain(RunningBatch(60, 10)).tokens_for(is_probe=True) == plain(RunningBatch(60, 10)).max_tokens > 0


def test_a_decision_for_a_batch_is_kept_for_some_steps(
    drafter: GroupedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = a_budget(drafter, 0.1, 0.0)
    asked: list[Any] = []

    def decide(*args: Any) -> Any:
        asked.append(args)
        return allot(*args)

    monkeypatch.setattr(live_budget, "allot", decide)
    budget._until_review = REVIEW_STEPS
    make_steps(budget, REVIEW_STEPS, 0.1, 0.0)
    assert len(asked) == 1
    make_steps(budget, 1, 0.1, 0.0)
    assert len(asked) == 2


def test_a_batch_that_is_not_refilled_drafts_by_what_its_slowest_accept(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped")
    drafter.acceptance.observe_many([1000] * 16, [900 - 50 * node for node in range(16)])
    budget = with_costs(MeasuredBudget(drafter, TREES), 0.1, 0.001)
    refilled, draining = (budget(RunningBatch(32, is_refilled=is_refilled)) for is_refilled in (True, False))
    assert refilled.max_tokens > draining.max_tokens > 0
    alone = [budget(RunningBatch(1, is_refilled=is_refilled)) for is_refilled in (True, False)]
    assert alone[0] == alone[1]  # one request has no slower one beside it
