# SPDX-License-Identifier: Apache-2.0
"""The native index against a brute-force twin that keeps plain lists and counts by scanning them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seer.drafting.index import CONFLICT, DraftIndex, DraftOptions
from seer.drafting.offline_replay import accepted_path

BEGIN = -1
GROUP = 7


class Twin:
    """What the index must agree with: every response as a list, with a start mark."""

    def __init__(self) -> None:
        self.responses: dict[int, list[int]] = {}

    def append(self, request: int, tokens: list[int]) -> None:
        self.responses.setdefault(request, [BEGIN]).extend(tokens)

    def count(self, pattern: list[int]) -> int:
        return sum(len(ends) for ends in self._ends(pattern).values())

    def followers(self, pattern: list[int]) -> dict[int, int]:
        seen: dict[int, int] = {}
        for request, ends in self._ends(pattern).items():
            for end in ends:
                if end < len(self.responses[request]):
                    token = self.responses[request][end]
                    seen[token] = seen.get(token, 0) + 1
        return seen

    def anchor(self, request: int) -> int:
        """Length of the longest suffix that occurs at another place too."""
        text = self.responses[request]
        for size in range(len(text), 0, -1):
            if self.count(text[-size:]) > 1:
                return size
        return 0

    def _ends(self, pattern: list[int]) -> dict[int, list[int]]:
        size = len(pattern)
        return {
            request: [end for end in range(size, len(text) + 1) if text[end - size : end] == pattern]
            for request, text in self.responses.items()
        }


pieces = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=0, max_size=9)), min_size=1, max_size=12
)
"""Interleaved growth of up to four responses over few tokens: many repeats, so many clones."""

wide_pieces = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 60), min_size=10, max_size=60)),
    min_size=2,
    max_size=8,
)
"""Many different followers, so that states become wide and hash tables are used."""


def build(steps: list[tuple[int, list[int]]]) -> tuple[DraftIndex, Twin]:
    index, twin = DraftIndex(), Twin()
    for request, tokens in steps:
        index.append_one(GROUP, request, tokens)
        twin.append(request, tokens)
        assert index.check_integrity(GROUP) == ""
    return index, twin


@given(pieces)
def test_counts_of_all_substrings_are_exact(steps: list[tuple[int, list[int]]]) -> None:
    index, twin = build(steps)
    for text in twin.responses.values():
        for start in range(1, len(text)):
            for end in range(start + 1, min(start + 12, len(text)) + 1):
                assert index.count(GROUP, text[start:end]) == twin.count(text[start:end])


@given(pieces, st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_what_never_occurred_has_no_count(steps: list[tuple[int, list[int]]], pattern: list[int]) -> None:
    index, twin = build(steps)
    assert index.count(GROUP, pattern) == twin.count(pattern)


@given(pieces)
def test_the_anchor_is_the_longest_suffix_found_elsewhere(steps: list[tuple[int, list[int]]]) -> None:
    index, twin = build(steps)
    for request in twin.responses:
        assert index.anchor_length(GROUP, request) == twin.anchor(request)


@given(pieces)
def test_followers_of_narrow_contexts_are_exact(steps: list[tuple[int, list[int]]]) -> None:
    index, twin = build(steps)
    for text in twin.responses.values():
        for size in (1, 2, 3):
            for end in range(1 + size, len(text) + 1):
                pattern = text[end - size : end]
                assert index.followers(GROUP, pattern) == twin.followers(pattern)


@given(wide_pieces)
@settings(max_examples=60)
def test_followers_of_wide_contexts_are_the_top_eight(steps: list[tuple[int, list[int]]]) -> None:
    # Token 0 before every other one makes its state as wide as the alphabet.
    steps = [(request, [token for t in tokens for token in (0, t)]) for request, tokens in steps]
    index, twin = build(steps)
    truth = twin.followers([0])
    got = index.followers(GROUP, [0])
    if len(truth) <= 16:
        assert got == truth
    else:
        assert sorted(got.values()) == sorted(truth.values())[-8:]
        assert all(truth[token] == count for token, count in got.items())


@given(st.lists(st.integers(0, 40), min_size=60, max_size=120), st.integers(20, 60))
@settings(max_examples=40)
def test_a_split_wide_context_keeps_its_top_eight(tokens: list[int], when: int) -> None:
    # 0 always comes after 1, until it comes after 2: then the state of "0" splits off that of "1 0".
    text = [token for i, t in enumerate(tokens) for token in (1 if i < when else 2, 0, 100 + t)]
    index, twin = build([(1, text)])
    for pattern in ([0], [1, 0], [2, 0]):
        truth, got = twin.followers(pattern), index.followers(GROUP, pattern)
        assert sorted(got.values()) == sorted(truth.values())[-8 if len(truth) > 16 else 0 :]
        assert all(truth[token] == count for token, count in got.items())


@given(pieces)
def test_a_response_can_be_read_back(steps: list[tuple[int, list[int]]]) -> None:
    index, twin = build(steps)
    for request, text in twin.responses.items():
        for start in {0, len(text) // 2, len(text) - 1}:
            assert index.tokens(GROUP, request, start).tolist() == text[1:][start:]


@given(pieces, st.integers(0, 2**32 - 1))
def test_appending_is_idempotent_under_duplication_and_reordering(
    steps: list[tuple[int, list[int]]], seed: int
) -> None:
    _, twin = build(steps)
    rng = np.random.default_rng(seed)
    replica = DraftIndex()
    cuts = [
        (request, start, text[1:][start : start + 4])
        for request, text in twin.responses.items()
        for start in range(0, len(text) - 1, 3)
    ]
    for request in twin.responses:
        replica.append_one(GROUP, request, [])
    # Every message twice, in any order; refused ones are sent again.
    waiting = [cuts[i] for i in rng.permutation(len(cuts))] * 2
    for _ in range(len(cuts) + 1):
        for request, start, tokens in waiting:
            held = replica.append_one(GROUP, request, tokens, previous_count=start)
            assert held <= len(twin.responses[request]) - 1
    for request, text in twin.responses.items():
        assert replica.tokens(GROUP, request).tolist() == text[1:]
        for end in range(2, len(text) + 1):
            pattern = text[max(end - 3, 1) : end]
            assert replica.count(GROUP, pattern) == twin.count(pattern)


@given(pieces, st.integers(1, 12), st.integers(1, 4), st.floats(0, 0.6))
def test_a_draft_is_a_tree_in_falling_confidence(
    steps: list[tuple[int, list[int]]], budget: int, paths: int, least: float
) -> None:
    index, twin = build(steps)
    options = DraftOptions(paths=paths, min_confidence=least)
    for request, text in twin.responses.items():
        draft = index.speculate_one(GROUP, request, budget, options=options)
        assert len(draft.tokens) <= budget
        assert np.all(np.diff(draft.confidence) <= 1e-6)
        assert np.all(draft.confidence >= least - 1e-3)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(draft.parents.tolist()):
            assert -1 <= parent < node
            children.setdefault(parent, []).append(int(draft.tokens[node]))
        assert all(len(set(c)) == len(c) <= paths for c in children.values())
        assert all(twin.count([t]) > 0 for t in draft.tokens.tolist()), text


@given(pieces, st.integers(2, 8))
def test_what_may_follow_a_node_is_never_likelier_than_the_node(steps: list[tuple[int, list[int]]], paths: int) -> None:
    # Nothing was verified yet, so confidences are uncorrected up to the rounding of the correction's knots.
    index, twin = build(steps)
    for request in twin.responses:
        draft = index.speculate_one(GROUP, request, 64, options=DraftOptions(paths=paths))
        for node in range(-1, len(draft.tokens)):
            parent = 1.0 if node == -1 else float(draft.confidence[node])
            assert draft.confidence[draft.parents == node].sum() <= parent + 0.01


def test_the_longest_context_that_knows_a_token_decides() -> None:
    # After "5 6" came 7, always. Whatever else came after 6 alone may share out only what "5 6" leaves open.
    alone, crowded = DraftIndex(), DraftIndex()
    for index in (alone, crowded):
        index.append_one(GROUP, 1, [5, 6, 7])
        index.append_one(GROUP, 2, [5, 6])
    crowded.append_one(GROUP, 3, [9, 6, 8] * 5)
    options = DraftOptions(paths=4)
    first = alone.speculate_one(GROUP, 2, 1, options=options)
    among = crowded.speculate_one(GROUP, 2, 8, options=options)
    assert first.tokens.tolist() == [7]
    roots = dict(zip(among.tokens[among.parents == -1].tolist(), among.confidence.tolist(), strict=False))
    assert set(roots) >= {7, 8}
    assert roots[7] > 0.25
    assert roots[8] <= 1 - roots[7] + 0.01


@given(pieces, st.integers(1, 10))
def test_a_tree_of_one_path_is_the_linear_draft(steps: list[tuple[int, list[int]]], budget: int) -> None:
    index, twin = build(steps)
    for request in twin.responses:
        draft = index.speculate_one(GROUP, request, budget)
        assert draft.parents.tolist() == list(range(-1, len(draft.parents) - 1))


@given(pieces, st.lists(st.integers(0, 4), max_size=12))
def test_a_context_drafts_only_what_followed_one_of_its_suffixes(
    steps: list[tuple[int, list[int]]], context: list[int]
) -> None:
    index, twin = build(steps)
    draft = index.speculate_context(GROUP, context, 1)
    followed = [
        set(twin.followers(context[-size:])) for size in range(1, len(context) + 1) if twin.count(context[-size:])
    ]
    known = set().union(*followed) if followed else set()
    assert (len(draft.tokens) == 1) == bool(known)
    assert set(draft.tokens.tolist()) <= known


@given(pieces, st.integers(1, 6), st.integers(0, 6))
def test_match_bounds_limit_the_contexts_used(steps: list[tuple[int, list[int]]], least: int, extra: int) -> None:
    index, twin = build(steps)
    options = DraftOptions(match_min=least, match_max=least + extra)
    for request, text in twin.responses.items():
        draft = index.speculate_one(GROUP, request, 1, options=options)
        known = [
            set(twin.followers(text[-size:]))
            for size in range(least, min(least + extra, len(text)) + 1)
            if twin.count(text[-size:]) > 1
        ]
        allowed = set().union(*known) if known else set()
        assert set(draft.tokens.tolist()) <= allowed
        assert (len(draft.tokens) == 1) == bool(allowed)


def test_a_bound_on_the_match_changes_which_context_speaks() -> None:
    index = DraftIndex()
    index.append_one(GROUP, 1, [5, 6, 7, 1] + [7, 2] * 8)  # after 7 mostly 2; after 5 6 7 always 1
    index.append_one(GROUP, 2, [5, 6, 7])
    assert index.speculate_one(GROUP, 2, 1).tokens.tolist() == [1]
    assert index.speculate_one(GROUP, 2, 1, options=DraftOptions(match_max=1)).tokens.tolist() == [2]
    assert index.speculate_one(GROUP, 2, 1, options=DraftOptions(match_min=5)).tokens.tolist() == []


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
@settings(max_examples=15)
def test_drafts_scored_by_growth_teach_the_same_as_reported_results(seed: int, paths: int) -> None:
    rng = np.random.default_rng(seed)
    grown, reported = DraftIndex(), DraftIndex()
    options = DraftOptions(paths=paths)
    for group in range(20):
        for index in (grown, reported):
            index.append_one(group, 1, [])
        text = rng.integers(0, 3, 120).astype(np.int32)
        done = 0
        while done < len(text):
            first = grown.speculate_one(group, 1, 6, options=options)
            second = reported.speculate_one(group, 1, 6, options=options, learn=False)
            path = accepted_path(first, text[done:])
            assert accepted_path(second, text[done:]) == path
            if done + len(path) < len(text):  # at the very end some nodes stay undecided
                reported.feedback(second.confidence, np.isin(np.arange(len(second.tokens)), path))
            step = text[done : done + len(path) + 1]
            for index in (grown, reported):
                index.append_one(group, 1, step, previous_count=done)
            done += len(step)
    points = np.linspace(0.05, 0.95, 10)
    assert np.allclose([grown.corrected(p) for p in points], [reported.corrected(p) for p in points], atol=0.05)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(0, 199))
def test_different_tokens_at_a_known_position_are_a_conflict(tokens: list[int], where: int) -> None:
    index = DraftIndex()
    index.append_one(GROUP, 1, tokens)
    where %= len(tokens)
    assert index.append_one(GROUP, 1, [tokens[where] + 1], previous_count=where) == CONFLICT
    assert index.tokens(GROUP, 1).tolist() == tokens


@pytest.mark.parametrize("period", [1, 2, 7, 64, 1000])
def test_a_loop_is_drafted_through_several_periods(period: int) -> None:
    index = DraftIndex()
    loop = list(range(period)) * (3000 // period)
    index.append_one(GROUP, 1, loop)
    draft = index.speculate_one(GROUP, 1, 32)
    truth = np.array([(len(loop) + i) % period for i in range(32)], np.int32)
    assert len(accepted_path(draft, truth)) == 32
