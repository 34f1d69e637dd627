"""Acceptance by position: many at once is one after the other, and depth is believed in until it is tried."""

from __future__ import annotations

import random

import pytest

from seer.speculation.acceptance import AcceptanceTracker


def test_many_drafts_at_once_weigh_as_much_as_one_after_the_other() -> None:
    dice = random.Random(1)
    singly, together = AcceptanceTracker(), AcceptanceTracker()
    for _ in range(20):
        tried, accepted = [0] * 8, [0] * 8
        for _ in range(100):
            num_drafted = dice.randint(1, 8)
            num_accepted = min(num_drafted, int(dice.expovariate(0.5)))
            singly.observe(num_drafted, num_accepted)
            for position in range(min(num_drafted, num_accepted + 1)):
                tried[position] += 1
                accepted[position] += position < num_accepted
        together.observe_many(tried, accepted)
    assert together.survival() == pytest.approx(singly.survival(), rel=0.05)


def test_positions_nobody_reached_fare_like_the_one_before() -> None:
    tracker = AcceptanceTracker(prior_acceptance=0.25, prior_weight=4.0)
    tracker.observe_many([1000, 800], [800, 640])
    rates = [later / earlier for earlier, later in zip(tracker.survival(), tracker.survival()[1:], strict=False)]
    assert rates == pytest.approx([0.8] * 8, abs=0.01)
    tracker.observe_many([0, 0, 500], [0, 0, 50])
    survival = tracker.survival()
    assert survival[3] / survival[2] == pytest.approx(0.1, abs=0.02)
