# SPDX-License-Identifier: Apache-2.0
"""Which budget rule a simulation drafts by: the scheduler's own, unless another one is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from builders import a_workload
from seer.sim import speculation
from seer.sim.cluster import simulate
from seer.speculation import budget
from seer.types import BudgetRule

WORKLOAD = a_workload([[300, 400], [500, 200]], instances=1, kv_tokens=4096, chunk_tokens=256)


@pytest.fixture
def rules_asked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The rules that simulated instances ask the budget for."""
    asked: set[str] = set()
    real = budget.allot

    def allot(rule: BudgetRule, *args: Any, **options: Any) -> Any:
        asked.add(rule)
        return real(rule, *args, **options)

    monkeypatch.setattr(speculation, "allot", allot)
    return asked


@pytest.mark.parametrize(
    ("scheduler", "rule"), [("seer", "seer"), ("seer-paper", "paper"), ("verl-sync+sd", "paper"), ("verl", None)]
)
def test_a_simulation_drafts_by_the_rule_of_its_scheduler(
    rules_asked: set[str], scheduler: str, rule: str | None
) -> None:
    simulate(WORKLOAD, scheduler)
    assert rules_asked == ({rule} if rule else set())


@pytest.mark.parametrize("rule", ["paper", "threshold", "seer"])
def test_a_given_rule_takes_the_place_of_the_schedulers_own(rules_asked: set[str], rule: BudgetRule) -> None:
    simulate(WORKLOAD, "seer", budget_rule=rule)
    assert rules_asked == {rule}


def test_without_speculation_no_rule_is_asked(rules_asked: set[str]) -> None:
    simulate(WORKLOAD, "seer", speculation="off")
    assert rules_asked == set()
