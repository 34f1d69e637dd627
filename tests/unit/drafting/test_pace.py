# SPDX-License-Identifier: Apache-2.0
"""How often a draft client talks to its server."""

from __future__ import annotations

import pytest

from seer.drafting.pace import PAUSE_S, SLOWEST_S, UNUSED_S, UNUSED_SHARE, Pace


def paced(interval_s: float, num_calls: int = 100) -> Pace:
    pace = Pace()
    for call in range(num_calls):
        pace.called(call * interval_s)
    return pace


def test_a_fast_engine_is_served_as_often_as_was_set() -> None:
    assert Pace().interval(0.025) == 0.025
    assert paced(0.002).interval(0.025) == 0.025


def test_a_slow_engine_is_served_as_often_as_it_calls() -> None:
    assert paced(0.06).interval(0.025) == pytest.approx(0.06, rel=1e-3)


def test_an_engine_that_hardly_calls_is_not_waited_for() -> None:
    assert paced(0.7).interval(0.025) == SLOWEST_S
    assert paced(0.7).interval(0.5) == 0.5


def test_a_pause_says_nothing_of_the_pace() -> None:
    pace = paced(0.06)
    pace.called(100 * 0.06 + PAUSE_S)
    assert pace.interval(0.025) == pytest.approx(0.06, rel=1e-3)


def test_messages_become_rarer_the_longer_nothing_was_drafted() -> None:
    pace = paced(0.04)
    pace.drafted(4.0)
    assert pace.between_messages(0.025, 4.0) == pytest.approx(0.04, rel=1e-3)
    assert pace.between_messages(0.025, 5.0) == pytest.approx(UNUSED_SHARE)
    assert pace.between_messages(0.025, 60.0) == UNUSED_S
    assert pace.between_messages(0.7, 60.0) == 0.7


def test_the_first_draft_makes_messages_frequent_again() -> None:
    pace = paced(0.04)
    pace.drafted(4.0)
    pace.drafted(60.0)
    assert pace.between_messages(0.025, 60.0) == pytest.approx(0.04, rel=1e-3)


def test_an_engine_that_drafts_elsewhere_gets_messages_at_its_pace() -> None:
    assert paced(0.04).between_messages(0.025, 60.0) == pytest.approx(0.04, rel=1e-3)


def test_a_draft_is_noticed_soon_however_rare_messages_are() -> None:
    pace = paced(0.04)
    pace.drafted(4.0)
    assert pace.between_looks(0.0125, 4.0) == pytest.approx(0.04, rel=1e-3)
    assert pace.between_looks(0.0125, 60.0) == SLOWEST_S
