# SPDX-License-Identifier: Apache-2.0
"""The index's Python face: arrays are checked, limits kept, memory returned, threads welcome."""

import threading

import numpy as np
import pytest

from seer.drafting.ids import mix, number_of
from seer.drafting.index import DraftIndex, DraftOptions


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def a_batch(size: int, width: int) -> tuple[np.ndarray, ...]:
    shape = (size, width)
    return (
        np.empty(shape, np.int32),
        np.empty(shape, np.int32),
        np.empty(shape, np.float32),
        np.empty(size, np.int32),
    )


def test_a_batch_over_groups_fills_the_callers_arrays() -> None:
    index = DraftIndex()
    tokens = np.array([1, 2, 3, 1, 2, 7, 8, 9, 7], np.int32)
    offsets = np.array([0, 3, 5, 8, 9], np.int64)
    groups, requests = ids(1, 1, 2, 2), ids(1, 2, 1, 2)
    lengths = index.append(groups, requests, np.zeros(4, np.int64), tokens, offsets)
    assert lengths.tolist() == [3, 2, 3, 1]
    out = a_batch(4, 2)
    index.speculate(groups, requests, np.array([0, 2, 0, 1], np.int32), *out)
    assert out[3].tolist() == [0, 1, 0, 1]
    assert out[0][1, 0] == 3
    assert out[0][3, 0] == 8


@pytest.mark.parametrize("paths", [1, 4])
def test_drafts_made_together_are_those_made_one_by_one(paths: int) -> None:
    # More requests than are drafted together, of many groups and of one, in any order, some twice, some unknown.
    rng = np.random.default_rng(5)
    index = DraftIndex()
    texts = rng.integers(0, 3, (40, 200))
    for group in range(10):
        for request in range(4):
            index.append_one(group, request, texts[4 * group + request, : rng.integers(0, 200)])
    groups = rng.integers(0, 11, 70).astype(np.uint64)
    groups[20:40] = 3
    requests = rng.integers(0, 5, 70).astype(np.uint64)
    budgets = rng.integers(0, 9, 70).astype(np.int32)
    tokens, parents = np.zeros((70, 8), np.int32), np.zeros((70, 8), np.int32)
    confidence, counts = np.zeros((70, 8), np.float32), np.zeros(70, np.int32)
    options = DraftOptions(paths=paths, min_confidence=0.01)
    index.speculate(groups, requests, budgets, tokens, parents, confidence, counts, options=options, learn=False)
    assert counts.max() > 4
    assert counts.min() == 0
    for i, size in enumerate(counts):
        alone = index.speculate_one(int(groups[i]), int(requests[i]), int(budgets[i]), options=options, learn=False)
        assert alone.tokens.tolist() == tokens[i, :size].tolist()
        assert alone.parents.tolist() == parents[i, :size].tolist()
        assert alone.confidence.tolist() == confidence[i, :size].tolist()


def test_the_prompt_speaks_before_the_first_token() -> None:
    index = DraftIndex()
    assert index.set_prompt(1, [5, 6, 7, 8, 5, 6])
    assert not index.set_prompt(1, [1])
    index.append_one(1, 1, [])
    assert index.speculate_one(1, 1, 2).tokens.tolist() == [7, 8]
    assert index.requests(1) == [1]


def test_a_bad_batch_is_refused_and_changes_nothing() -> None:
    index = DraftIndex()
    good = (ids(1), ids(1), np.zeros(1, np.int64), np.array([1, 2], np.int32), np.array([0, 2], np.int64))
    for place, bad in (
        (1, ids(1, 2)),
        (2, np.array([-1], np.int64)),
        (3, np.array([1, -2], np.int32)),
        (4, np.array([0, 3], np.int64)),
        (4, np.array([1, 2], np.int64)),
    ):
        batch = list(good)
        batch[place] = bad
        with pytest.raises(ValueError):
            index.append(*batch)
    with pytest.raises(TypeError):
        index.append(good[0].astype(np.float64), *good[1:])
    assert index.stats().groups == 0


def test_an_output_of_another_kind_is_refused_not_copied() -> None:
    index = DraftIndex()
    tokens, parents, confidence, counts = a_batch(1, 2)
    budgets = np.array([2], np.int32)
    with pytest.raises(TypeError):
        index.speculate(ids(1), ids(1), budgets, tokens.astype(np.int64), parents, confidence, counts)
    with pytest.raises(TypeError):
        index.speculate(ids(1), ids(1), budgets, np.empty((1, 4), np.int32)[:, ::2], parents, confidence, counts)


@pytest.mark.parametrize(
    "options",
    [
        DraftOptions(paths=0),
        DraftOptions(min_confidence=1.5),
        DraftOptions(match_min=0),
        DraftOptions(match_min=5, match_max=4),
    ],
)
def test_impossible_options_are_refused(options: DraftOptions) -> None:
    with pytest.raises(ValueError):
        DraftIndex().speculate_one(1, 1, 4, options=options)


def test_a_budget_wider_than_the_row_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        DraftIndex().speculate(ids(1), ids(1), np.array([3], np.int32), *a_batch(1, 2))


def test_an_unknown_request_gets_no_draft() -> None:
    index = DraftIndex()
    index.append_one(1, 1, [1, 2, 3])
    assert len(index.speculate_one(1, 2, 4).tokens) == 0
    assert len(index.speculate_one(9, 1, 4).tokens) == 0


def test_memory_stays_below_the_limit_and_the_oldest_group_goes_first() -> None:
    limit = 1 << 20
    index = DraftIndex(memory_limit_bytes=limit)
    rng = np.random.default_rng(0)
    for group in range(20):
        index.append_one(group, 1, rng.integers(0, 1000, 5000))
        assert index.stats().bytes <= limit
    assert index.stats().evicted_groups > 0
    assert index.length(19, 1) == 5000
    assert index.length(0, 1) == 0
    assert index.append_one(0, 1, [1], previous_count=5000) == 0, "an evicted response reports a gap"


def test_dropping_returns_all_memory() -> None:
    index = DraftIndex()
    for group in range(5):
        index.append_one(group, 1, np.arange(10_000))
    assert index.drop([0, 1, 2, 3, 4, 99]) == 5
    assert index.stats().bytes == 0


def test_threads_append_and_draft_side_by_side() -> None:
    index = DraftIndex()
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 20, 4000).astype(np.int32) for _ in range(4)]
    failures: list[BaseException] = []

    def grow(request: int) -> None:
        try:
            for start in range(0, 4000, 50):
                index.append_one(1, request, texts[request][start : start + 50], previous_count=start)
                index.speculate_one(1, (request + 1) % 4, 8, options=DraftOptions(paths=2))
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=grow, args=(request,)) for request in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    assert not failures
    assert index.check_integrity(1) == ""
    for request, text in enumerate(texts):
        assert index.tokens(1, request).tolist() == text.tolist()


def test_names_become_the_same_numbers_everywhere() -> None:
    assert number_of(7) == 7
    assert number_of("prompt-1") == 0x7FC0C644673F2399
    assert number_of("a") != number_of("b")
    assert mix(1, 2) != mix(2, 1)
    with pytest.raises(ValueError):
        number_of(-1)
