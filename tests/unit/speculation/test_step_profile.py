# SPDX-License-Identifier: Apache-2.0
"""What a profile says of shapes between those that were measured, and beyond them."""

from __future__ import annotations

from pathlib import Path

import pytest

from seer.errors import InputError
from seer.speculation.budget import allot
from seer.speculation.step_profile import ProfilePoint, StepProfile
from seer.speculation.throughput import BatchClass, DraftLimits, geometric_survival, linear


def a_profile(*points: tuple[int, int, float]) -> StepProfile:
    """Of requests, tokens per request and seconds."""
    made = (ProfilePoint(requests, tokens, 64, step_s, 5, 0.0) for requests, tokens, step_s in points)
    return StepProfile(model="m", device="cpu", dtype="float32", points=tuple(made))


def test_between_points_the_cost_is_on_a_line_and_below_the_first_it_is_the_first() -> None:
    profile = a_profile((1, 1, 1.0), (1, 5, 3.0), (3, 1, 2.0), (3, 5, 5.0))
    assert profile.step_s(1, 3) == 2.0
    assert profile.step_s(2, 1) == 1.5
    assert profile.step_s(2, 3) == 2.75
    assert profile.step_s(1, 0.5) == 1.0


def test_beyond_the_last_point_the_cost_goes_on_as_between_the_last_two() -> None:
    profile = a_profile((1, 1, 1.0), (1, 2, 1.0), (1, 4, 2.0), (2, 1, 3.0), (2, 2, 3.0), (2, 4, 4.0))
    assert profile.step_s(1, 8) == 4.0
    assert profile.step_s(4, 1) == 7.0


def test_noise_between_the_last_two_points_makes_no_larger_step_cheaper() -> None:
    """At nine tokens per request the line through both is at zero, and tokens per second would have no end."""
    profile = a_profile((1, 1, 0.020), (1, 3, 0.015), (2, 1, 0.019), (2, 3, 0.014))
    assert profile.step_s(1, 9) == profile.step_s(1, 3) == 0.015
    assert profile.step_s(30, 1) == profile.step_s(2, 1) == 0.019
    one = BatchClass(1, linear(geometric_survival(0.5, 16)))
    (size,) = allot("seer", profile, [one], DraftLimits(tuple(range(17))))
    assert size.tokens == 16  # by what is known, tokens are free


def test_a_step_that_took_no_time_is_no_measurement(tmp_path: Path) -> None:
    a_profile((1, 1, 0.0)).save(tmp_path / "profile.json")
    with pytest.raises(InputError, match="is not a profile"):
        StepProfile.load(tmp_path / "profile.json")
