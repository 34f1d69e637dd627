"""Drafts inside an instance's process: whose words are drafted from, and when drafting pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("seer.drafting._index")

from seer.drafting.client import DraftClient
from seer.engine.drafter import DraftAsk, StepReport
from seer.engine.host.drafts import FIRST_DEPTH, MIN_PLAIN_REPORTS, Drafts, GroupedDrafter, MeasuredBudget

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


def begin(drafter: GroupedDrafter, mode: Drafts, run: str = "a") -> None:
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


def test_words_of_an_earlier_epoch_are_drafted_by_their_group_and_their_run_only(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped", "a")
    drafter.recall({5: [SENTENCE]})
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
    monkeypatch.setattr("seer.engine.host.drafts.HOLD_S", 1e9)
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
    clock_s = iter([10.0, 10.01, 10.021, 10.03])
    monkeypatch.setattr("seer.engine.host.drafts.time.perf_counter", lambda: next(clock_s))
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
    assert after[3] < after[2] * after[2] / after[1]  # the third was tried and refused
    assert drafted(drafter, 6, 2, [1]) == []
    drafter.observe(6, 2, [5], start=0)
    assert drafter.acceptance.survival()[1] < after[1]  # allowed and not there: nothing gained


def test_a_tree_s_acceptance_counts_the_branch_that_was_taken(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped")
    drafter.observe(5, 0, [1, 2, 3, 4], start=0)
    drafter.observe(5, 1, [1, 2, 3, 4], start=0)
    drafter.observe(5, 2, [1, 2, 7, 8], start=0)
    drafter.observe(5, 3, [1, 2], start=0)
    (tree,) = drafter.draft([DraftAsk(5, 3, [0, 1, 2], 1, 4, 2)])
    taken = list(tree.tokens).index(7)
    assert {3, 7} <= set(tree.tokens)
    assert taken > 0
    before = drafter.acceptance.survival()
    drafter.observe(5, 3, [7], start=2)
    after = drafter.acceptance.survival()
    assert after[1 + taken] > before[1 + taken]
    assert after[1] < before[1]


def a_step(seconds: float, depth: int = 0) -> StepReport:
    return StepReport(seconds, 1, 4, 4 * (1 + depth), 0, 100, 4, 4 * depth, 0, num_allowed=depth)


def asked(budget: MeasuredBudget, step_s: Callable[[int], float], times: int) -> list[int]:
    answers = []
    for _ in range(times):
        answers.append(budget(4, 100).max_tokens)
        budget.on_step(a_step(step_s(answers[-1]), answers[-1]))
    return answers


def test_it_sees_plain_steps_first_and_then_what_drafting_costs(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped")
    first = asked(MeasuredBudget(drafter), lambda depth: 0.1, MIN_PLAIN_REPORTS + 1)
    assert first == [0] * MIN_PLAIN_REPORTS + [FIRST_DEPTH]


def test_where_rows_are_free_it_drafts_and_where_they_cost_a_step_it_does_not(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped")
    free = asked(MeasuredBudget(drafter), lambda depth: 0.1, 100)
    assert free[-20:].count(0) <= 1
    assert max(free) > FIRST_DEPTH
    dear = asked(MeasuredBudget(drafter), lambda depth: 0.1 * (1 + depth), 1000)
    assert 1 <= sum(depth > 0 for depth in dear[10:]) <= 20  # a trial now and then


def test_a_budget_for_trees_lets_every_draft_fork_and_one_for_lines_none(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped")
    for max_paths in (1, 2):
        budget = MeasuredBudget(drafter, max_paths=max_paths)
        asked(budget, lambda depth: 0.1, MIN_PLAIN_REPORTS)
        trial = budget(4, 100)
        asked(budget, lambda depth: 0.1, 20)
        assert trial.max_paths == budget(4, 100).max_paths == max_paths


def test_with_speculation_off_nothing_is_asked_for(drafter: GroupedDrafter) -> None:
    budget = MeasuredBudget(drafter)
    assert budget(4, 100).max_tokens == 0
