# SPDX-License-Identifier: Apache-2.0
"""How far responses outgrow the first of their group to finish: what changes the estimate, and what is carried on."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import a_group, end, requests_of
from seer.at_limit import LEAST_ENDED
from seer.context import Context
from seer.request import Request
from seer.spread import (
    FIRST_SPREAD,
    MOST_OPEN,
    SPREADS,
    WIDE_SPREAD,
    LifeTable,
    Spread,
    chosen_spread,
)

FIRST = 100
"""Tokens of the first of each group to finish."""


def groups_of(num: int, size: int) -> list[list[Request]]:
    return [requests_of(a_group(family, size, max_tokens=100_000)) for family in range(num)]


def finish(spread: Spread, members: Sequence[Request], lengths: Sequence[int]) -> None:
    """The members of a group end one after the other."""
    for member, length in zip(members, lengths, strict=True):
        end(member, length)
        spread.observe(member, members)


@pytest.mark.parametrize(
    ("longest", "value"), [(290, 3.0), (390, 4.0), (550, 6.0), (750, 8.0), (1500, 8.0), (1700, 16.0)]
)
def test_the_spread_follows_what_groups_have_shown(longest: int, value: float) -> None:
    spread = Spread()
    for members in groups_of(60, 8):
        finish(spread, members, (FIRST, *[longest] * 7))
    assert spread.value == value


def test_with_little_known_the_spread_is_the_first() -> None:
    spread = Spread()
    for members in groups_of(100, 2):
        finish(spread, members, (FIRST, 110))
    assert spread.value == FIRST_SPREAD


def test_responses_that_still_run_widen_the_spread() -> None:
    spread, groups = Spread(), groups_of(20, 8)
    for running in groups[0][1:]:
        running.num_generated = 17 * FIRST
    for members in groups:
        finish(spread, members[:1], (FIRST,))
        spread.observe(members[0], members)
    assert spread.value == WIDE_SPREAD


def test_responses_that_still_run_do_not_narrow_it() -> None:
    spread = Spread()
    for first, *running in groups_of(100, 8):
        for one in running:
            one.num_generated = 2 * FIRST
        end(first, FIRST)
        spread.observe(first, (first, *running))
    spread.begin()
    assert spread.value == FIRST_SPREAD


def test_the_next_rollout_starts_with_what_this_one_has_shown() -> None:
    spread = Spread()
    for members in groups_of(100, 8):
        finish(spread, members, (FIRST, *[390] * 7))
    assert Context(spread=spread).spread == 4.0
    assert Context().spread == FIRST_SPREAD


def test_a_change_of_lengths_is_followed_within_one_rollout_upwards_and_within_a_few_downwards() -> None:
    spread, seen = Spread(), []
    for length in (390, 2000, *[390] * 9):
        spread.begin()
        for members in groups_of(60, 8):
            finish(spread, members, (FIRST, *[length] * 7))
        seen.append(spread.value)
    assert seen[:2] == [4.0, WIDE_SPREAD]
    assert seen[-1] == 4.0


def test_what_a_cancelled_group_has_shown_is_kept_when_it_is_forgotten() -> None:
    context = Context()
    for members in groups_of(40, 2):
        first, cancelled = members
        end(first, FIRST)
        cancelled.num_generated = 20 * FIRST
        context.observe_finished(first, members)
        context.forget(first.group.family)
    assert context.spread == WIDE_SPREAD


def test_the_next_rollout_knows_that_the_limit_binds() -> None:
    spread = Spread()
    for at in range(LEAST_ENDED):
        (request,) = requests_of(a_group(at, 1, max_tokens=FIRST))
        end(request, FIRST)
        spread.observe(request, [request])
    assert Context(spread=spread).limit_binds
    assert not Context().limit_binds


def test_no_more_groups_are_watched_than_a_look_can_afford() -> None:
    spread = Spread()
    for first, other in groups_of(MOST_OPEN + 50, 2):
        end(first, FIRST)
        spread.observe(first, (first, other))
    assert spread.num_watched == MOST_OPEN


def test_a_group_whose_first_finish_was_not_watched_is_left_out() -> None:
    """Its shortest response is not known, so ratios to another one would be too small."""
    spread = Spread()
    for members in groups_of(100, 8):
        end(members[0], FIRST)
        for late in members[1:]:
            end(late, 10 * FIRST)
            spread.observe(late, members)
    spread.begin()
    assert spread.value == FIRST_SPREAD


LENGTHS = st.lists(st.lists(st.integers(1, 4000), min_size=2, max_size=5), min_size=1, max_size=30)


@given(groups=LENGTHS, order=st.randoms(use_true_random=False))
def test_once_all_have_ended_the_table_counts_every_response_but_the_first_of_each_group(
    groups: list[list[int]], order: object
) -> None:
    spread = Spread()
    members_of = [requests_of(a_group(family, len(row), max_tokens=5000)) for family, row in enumerate(groups)]
    ends = sorted((length, family, at) for family, row in enumerate(groups) for at, length in enumerate(row))
    for length, family, at in ends:  # all run side by side
        for members in members_of:
            for member in members:
                member.num_generated = member.num_generated if member.ended else length
        end(members_of[family][at], length)
        spread.observe(members_of[family][at], members_of[family])
        assert spread.value in SPREADS
    table = LifeTable()
    for members in members_of:
        first = min(members, key=lambda member: (member.num_generated, member.index))
        table.add_group(first, members)
    assert spread.num_watched == 0
    assert spread.known.ended == table.ended
    assert not any(table.running)
    ratios = [length / min(row) for row in groups for length in sorted(row)[1:]]
    for spread_value in SPREADS:
        beyond = sum(ratio > spread_value for ratio in ratios) / len(ratios)
        assert table.seen_beyond(spread_value) == pytest.approx(beyond)
        assert table.share_beyond(spread_value) >= beyond - 1e-9
    assert chosen_spread(table) in SPREADS
