# SPDX-License-Identifier: Apache-2.0
"""Walking down a draft tree."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from seer.drafting.base import DraftTree
from seer.engine.local.tree_walk import walk

#        root -> 7 -> 8 -> 9
#             -> 5 -> 8
TREE = DraftTree([7, 8, 9, 5, 8], [None, 0, 1, None, 3])


def test_without_a_tree_the_drawn_token_is_emitted() -> None:
    way = walk(None, [42], 10, ())
    assert (way.rows, way.nodes, way.stopped) == ([0], [], False)


def test_it_follows_the_drawn_tokens_and_emits_one_more() -> None:
    way = walk(TREE, [7, 8, 1, 0, 0, 0], 10, ())
    assert (way.rows, way.nodes) == ([0, 1, 2], [0, 1])


def test_equal_tokens_under_different_parents_are_different_nodes() -> None:
    way = walk(TREE, [5, 0, 0, 0, 8, 3], 10, ())
    assert (way.rows, way.nodes) == ([0, 4, 5], [3, 4])


def test_a_token_no_child_carries_ends_the_walk() -> None:
    assert walk(TREE, [6, 0, 0, 0, 0, 0], 10, ()).nodes == []


def test_it_stops_at_the_limit_even_when_the_draft_goes_on() -> None:
    way = walk(TREE, [7, 8, 9, 4, 0, 0], 2, ())
    assert way.rows == [0, 1]
    assert way.nodes == [0]


def test_nothing_follows_a_stop_token() -> None:
    way = walk(TREE, [7, 8, 9, 4, 0, 0], 10, {8})
    assert (way.rows, way.nodes, way.stopped) == ([0, 1], [0], True)


def test_pruning_drops_nodes_that_are_too_deep_and_their_descendants() -> None:
    pruned = TREE.pruned(max_tokens=10, max_depth=1)
    assert (list(pruned.tokens), list(pruned.parents)) == ([7, 5], [None, None])
    assert list(TREE.pruned(max_tokens=2, max_depth=9).tokens) == [7, 8]


def test_a_child_before_its_parent_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="node 0"):
        DraftTree([1, 2], [1, None])
