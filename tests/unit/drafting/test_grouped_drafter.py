# SPDX-License-Identifier: Apache-2.0
"""The grouped index as a drafter: siblings help, and tokens stay what they were."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from draft_servers import CLIENT_KEYS, DEADLINE_S, server_status, serving
from engines import a_chunk, always, an_engine, generate, tokens_of
from seer.drafting.base import DraftAsk
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.engine.local.tiny import make_tiny_model
from seer.types import DraftMode


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


def test_the_prompt_is_drafted_from_before_any_sibling_has_said_a_word() -> None:
    drafter = a_drafter()
    prompt = [10, 11, 12, 13, 14, 15]
    drafter.register(3, 1, prompt)
    drafter.observe(3, 1, [10, 11, 12], start=0)
    (tree,) = drafter.draft([DraftAsk(3, 1, [*prompt, 10, 11, 12], 6, 3)])
    assert list(tree.tokens) == [13, 14, 15]


@pytest.mark.parametrize("mode", ["grouped", "grouped-paper", "own"])
def test_the_end_of_a_group_frees_its_tokens_here_and_on_its_server(mode: DraftMode) -> None:
    with serving() as address:
        drafters = [GroupedDrafter((address,), CLIENT_KEYS) for _ in range(2)]
        for number, drafter in enumerate(drafters):
            drafter.begin_run("test", mode, 0)
            for group in (3, 4):
                drafter.register(group, 10 * group + number, [1, 2, 3])
                drafter.observe(group, 10 * group + number, [10, 11, 12], start=0)
            drafter.learn()
            assert drafter._client.flush(DEADLINE_S)
        assert groups_on(address) == (4 if mode == "own" else 2)
        for drafter in drafters:
            drafter.drop(3)
            assert drafter._client.flush(DEADLINE_S)
        assert groups_on(address) == (2 if mode == "own" else 1)
        held = [drafter._client.index.stats().groups for drafter in drafters]
        assert held == [1, 1]
        for drafter in drafters:
            drafter.close()


@pytest.mark.parametrize("mode", ["grouped", "own"])
def test_tokens_that_wait_when_their_group_ends_do_not_bring_it_back(mode: DraftMode) -> None:
    """Those of a request that was aborted: it does not leave by `forget`."""
    drafter = a_drafter()
    drafter.begin_run("test", mode, 0)
    for group in (3, 4):
        drafter.register(group, 10 * group, [1, 2, 3])
        drafter.observe(group, 10 * group, [10, 11, 12], start=0)
    drafter.drop(3)
    drafter.learn()
    assert drafter._client.index.stats().groups == 1
    drafter.observe(4, 40, [13], start=3)
    drafter.learn()
    assert drafter._client.index.stats().groups == 1
    drafter.drop(4)
    assert drafter._client.index.stats().groups == 0


def test_without_drafts_no_thread_looks_for_messages() -> None:
    with serving() as address:
        drafter = GroupedDrafter((address,), CLIENT_KEYS)
        try:
            assert not exchanges_tokens(drafter)
            drafter.begin_run("with", "grouped", 0)
            assert exchanges_tokens(drafter)
            drafter.begin_run("without", "none", 0)
            assert not exchanges_tokens(drafter)
            drafter.drop(3)
            drafter.begin_run("with again", "grouped", 0)
            assert exchanges_tokens(drafter)
        finally:
            drafter.close()


def exchanges_tokens(drafter: GroupedDrafter) -> bool:
    return drafter._client._thread is not None


def test_responses_of_an_earlier_epoch_go_with_their_group() -> None:
    drafter = a_drafter()
    drafter.seed_from({3: [[10, 11, 12]], 4: [[20, 21, 22]]})
    drafter.drop(3)
    assert drafter._client.index.stats().groups == 1


def groups_on(address: str) -> int:
    return server_status(address, CLIENT_KEYS, deadline_s=DEADLINE_S).groups


def test_a_greedy_group_is_verified_in_a_few_steps_and_unchanged(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    group = [a_chunk(i, [5, 9, 33], max_tokens=60, temperature=0.0, group=1) for i in range(4)]
    plain = generate(an_engine(folder), group)
    engine = an_engine(folder, drafter=a_drafter(), budget=always(8, 2))
    drafted = generate(engine, group, arrive={1: 70, 2: 70, 3: 70})
    assert tokens_of(drafted) == tokens_of(plain)
    assert sum(answer.num_accepted for answer in drafted.values()) > 100
