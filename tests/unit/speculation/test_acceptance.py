# SPDX-License-Identifier: Apache-2.0
"""Acceptance by depth: many at once is one after the other, and depth is believed in until it is tried."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from seer.speculation.acceptance import AcceptanceTracker


def test_many_drafts_at_once_weigh_as_much_as_one_after_the_other() -> None:
    dice = random.Random(1)
    singly, together = AcceptanceTracker(), AcceptanceTracker()
    for _ in range(20):
        tried, accepted = [0] * 8, [0] * 8
        for _ in range(100):
            num_allowed = dice.randint(1, 8)
            num_accepted = min(num_allowed, int(dice.expovariate(0.5)))
            singly.observe(num_allowed, range(num_accepted))
            for depth in range(num_allowed):
                tried[depth] += 1
                accepted[depth] += depth < num_accepted
        together.observe_many(tried, accepted)
    assert together.survival() == pytest.approx(singly.survival(), rel=0.05)


def test_survival_sums_to_what_was_accepted() -> None:
    dice, tracker, gains = random.Random(2), AcceptanceTracker(), []
    for _ in range(5000):
        gains.append(min(8, int(dice.expovariate(0.4))))
        tracker.observe(8, range(gains[-1]))
    assert sum(tracker.survival()[1:9]) == pytest.approx(sum(gains[-1500:]) / 1500, rel=0.1)


def test_depths_that_were_never_allowed_lose_as_much_as_the_one_before() -> None:
    tracker = AcceptanceTracker(prior_acceptance=0.25, prior_weight=4.0)
    tracker.observe_many([1000, 1000], [800, 640])
    rates = [later / earlier for earlier, later in pairwise(tracker.survival())]
    assert rates == pytest.approx([0.8] * 16, abs=0.01)
    tracker.observe_many([0, 0, 1000], [0, 0, 50])
    assert tracker.survival()[3] == pytest.approx(0.05, abs=0.01)


def test_more_is_never_likelier_than_less() -> None:
    tracker = AcceptanceTracker()
    tracker.observe_many([100, 100], [20, 0])
    tracker.observe_many([0, 0, 100], [0, 0, 100])
    assert all(later <= earlier for earlier, later in pairwise(tracker.survival()))


def test_a_token_of_a_tree_is_counted_at_its_place() -> None:
    tracker = AcceptanceTracker(prior_weight=1.0, half_life=64.0)
    for _ in range(2000):
        tracker.observe(4, [1, 3])  # the second child of the root, and its own child
    assert tracker.survival()[1:5] == pytest.approx([0.0, 0.0, 0.0, 0.0], abs=0.01)  # never grows
    for _ in range(2000):
        tracker.observe(4, [0, 1, 3])
    assert tracker.survival()[1:5] == pytest.approx([1.0, 1.0, 0.0, 0.0], abs=0.05)
