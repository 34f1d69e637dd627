# SPDX-License-Identifier: Apache-2.0
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seer.speculation.allocation import allocate, best_total

rows = st.lists(st.lists(st.integers(1, 20), max_size=6), min_size=1, max_size=8)


def arrays(drafts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    counts = np.array([len(draft) for draft in drafts], np.int32)
    confidence = np.full((len(drafts), 6), 9.0, np.float32)  # beyond counts: not to be looked at
    for row, draft in enumerate(drafts):
        confidence[row, : len(draft)] = np.sort(np.array(draft, np.float32))[::-1] / 20
    return confidence, counts


def test_the_most_confident_tokens_of_the_batch_are_kept() -> None:
    confidence, counts = arrays([[18, 16, 2], [10], [17, 1]])
    assert allocate(confidence, counts, 3).tolist() == [2, 0, 1]
    assert allocate(confidence, counts, 4).tolist() == [2, 1, 1]


def test_a_weight_speaks_for_a_request() -> None:
    confidence, counts = arrays([[18, 16], [10, 9]])
    assert allocate(confidence, counts, 2, weights=np.array([1, 2], np.float32)).tolist() == [1, 1]


@given(rows, st.integers(0, 60))
def test_kept_tokens_are_prefixes_worth_at_least_any_other_choice(drafts: list[list[int]], budget: int) -> None:
    confidence, counts = arrays(drafts)
    kept = allocate(confidence, counts, budget)
    assert np.all(kept <= counts)
    assert kept.sum() == min(budget, counts.sum())
    worth = sum(confidence[row, : kept[row]].sum() for row in range(len(drafts)))
    best = np.sort(np.concatenate([confidence[row, : counts[row]] for row in range(len(drafts))]))[::-1]
    assert np.isclose(worth, best[:budget].sum(), atol=1e-5)


@given(rows, st.integers(0, 40))
def test_a_larger_budget_takes_nothing_away(drafts: list[list[int]], budget: int) -> None:
    confidence, counts = arrays(drafts)
    assert np.all(allocate(confidence, counts, budget + 1) >= allocate(confidence, counts, budget))


def test_speculation_is_off_where_a_step_costs_as_much_as_it_gains() -> None:
    confidence, counts = arrays([[4, 2], [3]])
    flat = np.ones(10)
    steep = 1.0 + 0.5 * np.arange(10, dtype=np.float64)
    assert best_total(confidence, counts, flat) == 3
    assert best_total(confidence, counts, steep) == 0


def test_the_best_total_maximises_tokens_per_second() -> None:
    confidence, counts = arrays([[19, 10, 1], [18, 2]])
    cost = 1.0 + 0.2 * np.arange(6, dtype=np.float64)
    gains = np.cumsum([0, 0.95, 0.9, 0.5, 0.1, 0.05])
    assert best_total(confidence, counts, cost) == int(np.argmax((2 + gains) / cost))
