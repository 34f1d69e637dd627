# SPDX-License-Identifier: Apache-2.0
"""When a process is given up: numbers behind each test are the invariants of signs_of_life.py."""

from __future__ import annotations

import pytest

from seer.hosting.signs_of_life import SignsOfLife


def signs() -> SignsOfLife:
    one = SignsOfLife(silence_deadline_s=4.0, progress_deadline_s=16.0)
    one.begin(100.0)
    return one


def test_a_silent_process_is_given_up_after_its_deadline() -> None:
    one = signs()
    assert one.why_lost(104.0, num_chunks=0) is None
    assert one.why_lost(104.5, num_chunks=0) == "no message from its process for 4 s"
    one.spoke(104.5)
    assert one.why_lost(108.5, num_chunks=0) is None


def test_a_process_that_speaks_and_does_not_step_is_given_up_while_it_has_chunks() -> None:  # 3
    one = signs()
    one.spoke(116.5)
    assert one.why_lost(116.5, num_chunks=0) is None
    assert one.why_lost(116.5, num_chunks=2) == "2 chunks in flight, no step for 16 s"
    one.stepped(116.5)
    assert one.why_lost(116.5, num_chunks=2) is None


def test_time_by_which_the_reader_was_late_counts_for_neither_deadline() -> None:  # 1
    one = signs()
    one.forgive(late_s=30.0, waited_s=1.0)
    assert one.silent_s(134.0) == 4.0
    assert one.why_lost(134.0, num_chunks=1) is None
    one.forgive(late_s=-1.0, waited_s=0.0)  # a clock's grain
    assert one.silent_s(134.0) == 4.0, "an early look takes nothing back"


@pytest.mark.parametrize("heartbeat_s", [0.25, 1.0])
def test_a_process_that_always_waits_for_a_core_is_found_after_ten_deadlines(heartbeat_s: float) -> None:  # 2
    one, now_s = signs(), 100.0
    while one.why_lost(now_s, num_chunks=1) is None and now_s < 200.0:
        now_s += heartbeat_s
        one.forgive(late_s=0.0, waited_s=heartbeat_s)
    assert 139.0 < now_s <= 140.0 + 2 * heartbeat_s
