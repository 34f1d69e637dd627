# SPDX-License-Identifier: Apache-2.0
"""What is added to verl's log, and the warning of the on-policy check; nothing is started."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
from verl.utils.tracking import Tracking

from seer.integrations.verl import verl_log
from seer.integrations.verl.verl_log import MAX_MEAN_DIFFERENCE, OffPolicy, add_to_log

LOGGED = {"timing_s/step": 1.0, verl_log.LARGEST_DIFFERENCE: 0.5}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Of verl's log, with the numbers of a driver that stands in."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(Tracking, "log", lambda self, data, step, backend=None: found.append(data))
    monkeypatch.setattr(Tracking, "finish", Tracking.finish)
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    add_to_log(SimpleNamespace(finish_step=SimpleNamespace(remote=lambda step, logged: {"failed_responses": 0.0})))
    return found


@pytest.mark.parametrize("mean", [2 * MAX_MEAN_DIFFERENCE, math.nan])
def test_probabilities_that_differ_give_a_warning(lines: list[dict[str, Any]], mean: float) -> None:
    with pytest.warns(OffPolicy, match="the rollout of step 7 is off policy"):
        Tracking.log(object(), {**LOGGED, verl_log.MEAN_DIFFERENCE: mean}, 7)
    assert len(lines) == 1


def test_rounding_gives_none(lines: list[dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tracking.log(object(), {**LOGGED, verl_log.MEAN_DIFFERENCE: MAX_MEAN_DIFFERENCE / 2}, 7)
        Tracking.log(object(), {"timing_s/step": 1.0}, 8)
    assert lines[0]["seer/on_policy/mean_difference"] == MAX_MEAN_DIFFERENCE / 2
    assert lines[1]["seer/failed_responses"] == 0.0
