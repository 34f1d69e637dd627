"""What became of drafts, place by place."""

from __future__ import annotations

import pytest

from seer.speculation.acceptance import AcceptanceTracker
from seer.speculation.budget import MAX_DEPTH


def test_what_was_never_tried_goes_on_as_what_was() -> None:
    good, bad = AcceptanceTracker(), AcceptanceTracker()
    for _ in range(2000):
        good.observe(2, [0, 1])
        bad.observe(2, [])
    assert good.survival()[MAX_DEPTH] > 0.9
    assert bad.survival()[MAX_DEPTH] < 0.01


def test_a_place_counts_where_it_was_allowed_only() -> None:
    tracker = AcceptanceTracker(prior_weight=1e-9, half_life=1e9)
    for _ in range(100):
        tracker.observe(1, [0])
        tracker.observe(3, [0, 2])  # a tree: its third node is a child of the first
    assert tracker.survival()[:4] == pytest.approx([1.0, 1.0, 0.0, 1.0], abs=1e-6)


def test_asking_in_between_changes_nothing() -> None:
    often, once = AcceptanceTracker(), AcceptanceTracker()
    for i in range(300):
        for tracker in (often, once):
            tracker.observe(4, range(i % 5))
        often.survival()
    assert once.survival() == pytest.approx(often.survival(), rel=0.02)


def test_what_came_long_ago_is_forgotten() -> None:
    tracker = AcceptanceTracker()
    for accepted in ([0, 1, 2, 3], []):
        for _ in range(3000):
            tracker.observe(4, accepted)
            tracker.survival()
    assert tracker.survival()[1] < 0.01
