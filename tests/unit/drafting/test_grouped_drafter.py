# SPDX-License-Identifier: Apache-2.0
"""The grouped index as a drafter: siblings help, and tokens stay what they were."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from engines import a_chunk, always, an_engine, generate, tokens_of
from seer.drafting.base import DraftAsk
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.engine.local.tiny import make_tiny_model


def a_drafter() -> GroupedDrafter:
    drafter = GroupedDrafter((), None)
    drafter.begin_run("test", "grouped", 0)
    return drafter


def test_a_sibling_that_says_the_same_is_drafted_from() -> None:
    drafter = a_drafter()
    drafter.observe(3, 0, [10, 11, 12, 13, 14, 15], start=0)
    drafter.observe(3, 1, [10, 11, 12], start=0)
    (tree,) = drafter.draft([DraftAsk(3, 1, [1, 10, 11, 12], 1, 3)])
    assert list(tree.tokens) == [13, 14, 15]
    assert list(tree.parents) == [None, 0, 1]


def test_a_greedy_group_is_verified_in_a_few_steps_and_unchanged(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    group = [a_chunk(i, [5, 9, 33], max_tokens=60, temperature=0.0, group=1) for i in range(4)]
    plain = generate(an_engine(folder), group)
    engine = an_engine(folder, drafter=a_drafter(), budget=always(8, 2))
    drafted = generate(engine, group, arrive={1: 70, 2: 70, 3: 70})
    assert tokens_of(drafted) == tokens_of(plain)
    assert sum(answer.num_accepted for answer in drafted.values()) > 100
