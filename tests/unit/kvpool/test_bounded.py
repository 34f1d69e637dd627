# SPDX-License-Identifier: Apache-2.0
"""A library call that hangs costs its caller the deadline, and other callers nothing."""

from __future__ import annotations

import threading

import pytest

from seer.errors import DeadlineExceeded, PoolError
from seer.kvpool.bounded import BoundedCalls, Breaker


def test_a_result_and_an_error_come_through() -> None:
    calls = BoundedCalls("t", 1, deadline_s=10, retry_s=10)
    assert calls.call(lambda: 7, what="x") == 7
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda: 1 // 0, what="x")
    calls.close()


def test_a_call_that_hangs_ends_at_its_deadline_and_opens_the_breaker() -> None:
    calls, hang, late = (
        BoundedCalls("t", 1, deadline_s=0.05, retry_s=60),
        threading.Event(),
        threading.Event(),
    )
    with pytest.raises(DeadlineExceeded, match=r"asking took longer than 0\.05 s"):
        calls.call(hang.wait, what="asking", when_late=late.set)
    with pytest.raises(PoolError, match="not asked again yet"):
        calls.call(lambda: 7, what="asking")
    assert not late.is_set(), "what the call uses is still its own"
    hang.set()
    assert late.wait(10), "it is given back when the call ends"
    calls.close()


def test_a_call_that_never_began_never_begins() -> None:
    calls, hang = BoundedCalls("t", 1, deadline_s=0.05, retry_s=0), threading.Event()
    began, late = threading.Event(), threading.Event()
    with pytest.raises(DeadlineExceeded):
        calls.call(hang.wait, what="first")
    with pytest.raises(DeadlineExceeded):
        calls.call(began.set, what="second", when_late=late.set)
    assert late.wait(10)
    hang.set()
    assert calls.call(lambda: 7, what="third", deadline_s=10) == 7
    assert not began.is_set()
    calls.close()


def test_the_breaker_closes_after_its_time() -> None:
    now = 0.0
    breaker = Breaker(5.0, clock=lambda: now)
    assert not breaker.open
    breaker.trip()
    assert breaker.open
    now = 5.0
    assert not breaker.open
    assert breaker.num_opened == 1
