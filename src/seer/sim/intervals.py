# SPDX-License-Identifier: Apache-2.0
"""The mean of a number over seeds, and the interval that contains the mean over all seeds with 95% confidence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 9: 2.26, 11: 2.20, 15: 2.13, 23: 2.07, 30: 2.04}
"""Student's t for 95% by degrees of freedom."""


class Mean(NamedTuple):
    """A mean, and how far the mean over all seeds may be from it."""

    value: float
    half_width: float
    """0 for a single value, whose error is unknown."""


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and half of its 95% interval. Between the stated degrees of freedom the wider interval is taken."""
    if len(values) < 2:
        return Mean(values[0], 0.0)
    t = T_95[max(degrees for degrees in T_95 if degrees < len(values))]
    return Mean(statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values)))
