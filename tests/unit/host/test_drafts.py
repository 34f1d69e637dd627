"""Drafts inside an instance's process: whose words are drafted from, and when drafting pays."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("seer.drafting._index")

from seer.drafting.client import DraftClient
from seer.engine.drafter import DraftAsk, StepReport
from seer.engine.host.drafts import TRIAL_PERIOD, TRIAL_TOKENS, Drafts, GroupedDrafter, MeasuredBudget

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
    assert after[3] / after[2] < before[3] / before[2]  # the third was tried and refused


def a_step(rows: int, seconds: float, *, running: int = 4, prefill: int = 0) -> StepReport:
    return StepReport(
        duration_s=seconds,
        num_steps=1,
        num_running=running,
        num_rows=rows,
        num_prefill_rows=prefill,
        mean_context_tokens=100,
        num_emitted=running,
        num_drafted=rows - running,
        num_accepted=0,
    )


def a_budget(drafter: GroupedDrafter, base_s: float, slope_s: float) -> MeasuredBudget:
    begin(drafter, "grouped")
    budget = MeasuredBudget(drafter)
    for i in range(40):
        rows = 4 + i % 8
        budget.on_step(a_step(rows, base_s + slope_s * rows))
    return budget


def test_where_rows_are_free_it_drafts_and_where_they_cost_a_step_it_does_not(drafter: GroupedDrafter) -> None:
    assert a_budget(drafter, 0.1, 0.0)(4, 100).max_tokens > TRIAL_TOKENS
    dear = a_budget(drafter, 0.0, 0.1)
    asked = [dear(4, 100).max_tokens for _ in range(16 * TRIAL_PERIOD)]
    assert set(asked) == {0, TRIAL_TOKENS}
    trials = [step for step, tokens in enumerate(asked) if tokens]
    gaps = [later - earlier for earlier, later in pairwise(trials)]
    assert gaps == [16, 32, 64, 128, 128, 128]  # rarer and rarer, up to four requests' worth of the period


def test_a_budget_for_trees_lets_every_draft_fork_and_one_for_lines_none(drafter: GroupedDrafter) -> None:
    begin(drafter, "grouped")
    for max_paths in (1, 2):
        budget = MeasuredBudget(drafter, max_paths=max_paths)
        trial = budget(4, 100)
        assert trial.max_tokens == TRIAL_TOKENS
        for rows in range(4, 44):
            budget.on_step(a_step(4 + rows % 8, 0.1))
        assert budget(4, 100).max_tokens > TRIAL_TOKENS
        assert trial.max_paths == budget(4, 100).max_paths == max_paths


def test_with_speculation_off_nothing_is_asked_for(drafter: GroupedDrafter) -> None:
    budget = MeasuredBudget(drafter)
    assert budget(4, 100).max_tokens == 0
