# SPDX-License-Identifier: Apache-2.0
"""Means over seeds and their intervals."""

import pytest

from seer.sim.intervals import mean_of


def test_the_interval_is_students_over_the_root_of_the_number_of_seeds() -> None:
    mean, half_width = mean_of([1.0, 2.0, 3.0, 4.0])
    assert mean == pytest.approx(2.5)
    assert half_width == pytest.approx(3.18 * 1.29099 / 2, rel=1e-4)


def test_between_known_degrees_of_freedom_the_interval_is_the_wider_one() -> None:
    nine = [0.0, 1.0] * 4 + [0.5]  # 8 degrees of freedom: t of 7 is used
    assert mean_of(nine).half_width == pytest.approx(2.36 * 0.5 / 3, rel=1e-3)


def test_one_seed_has_no_interval() -> None:
    assert mean_of([7.0]) == (7.0, 0.0)
