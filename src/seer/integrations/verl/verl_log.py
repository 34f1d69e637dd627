# SPDX-License-Identifier: Apache-2.0
"""Seer's numbers in verl's log, and the on-policy check, which verl's own numbers give.

verl offers no place for metrics of a rollout, so its `Tracking.log` is wrapped in the trainer's process. So is
`Tracking.finish`, verl's last call in a training that ends or fails: there the driver gives back what it holds.

Where `calculate_log_probs=True`, verl compares the probabilities of the sampled tokens with the trainer's own and logs
the difference. Under equal weights it is rounding only. Weights that did not arrive make it much larger: then a warning
says so.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from typing import Any

import ray
from verl.utils.tracking import Tracking

from seer.integrations.verl.training_folder import REWARD

log = logging.getLogger(__name__)

MEAN_DIFFERENCE, LARGEST_DIFFERENCE = "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"
"""verl's names: of the probability of each sampled token."""
MAX_MEAN_DIFFERENCE = 0.05
"""Far above the noise of bfloat16 against float32; other weights differ by more within a few steps."""

STOCK = "seer/stock_rollout_s"
"""From a replay (step_record.py)."""
CLOSE_DEADLINE_S = 30.0
"""Hanging up and freeing the pool; the driver ends with the job in any case."""


class OffPolicy(UserWarning):
    """The rollout's probabilities are not the trainer's."""


def add_to_log(driver: Any) -> None:
    """Add the driver's numbers to every line that the trainer logs for a training step."""
    usual = Tracking.log

    @functools.wraps(usual)
    def log_with_ours(self: Any, data: dict[str, Any], step: int, backend: Any = None) -> None:
        if any(name.startswith("timing_s/") for name in data):
            data = {**data, **_numbers(driver, data, step)}
            check_on_policy(data, step)
            if STOCK in data:
                sys.stdout.write(comparison(data, step))
        usual(self, data, step, backend)

    last = Tracking.finish

    @functools.wraps(last)
    def finish(self: Any, *args: Any, **kwargs: Any) -> None:
        last(self, *args, **kwargs)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(driver.close.remote(), timeout=CLOSE_DEADLINE_S)

    Tracking.log, Tracking.finish = log_with_ours, finish


def comparison(data: dict[str, Any], step: int) -> str:
    """A line about the rollout of a step, for the trainer's output."""
    return (
        f"seer: the rollout of step {step} took {data['seer/rollout_s']:.1f} s, "
        f"stock dispatch would have taken {data[STOCK]:.1f} s\n"
    )


def _numbers(driver: Any, data: dict[str, Any], step: int) -> dict[str, float]:
    logged = {name: float(data[name]) for name in (REWARD,) if name in data}
    try:
        found = ray.get(driver.finish_step.remote(step, logged))
        numbers = {f"seer/{name}": value for name, value in found.items()}
    except ray.exceptions.RayError as error:
        log.warning("the driver's numbers are not in the log: %s", error)
        return {}
    if MEAN_DIFFERENCE in data:
        numbers["seer/on_policy/mean_difference"] = float(data[MEAN_DIFFERENCE])
        numbers["seer/on_policy/largest_difference"] = float(data[LARGEST_DIFFERENCE])
    return numbers


def check_on_policy(data: dict[str, Any], step: int) -> None:
    """Warn if the tokens of this step were sampled under other weights than the trainer's."""
    mean = data.get("seer/on_policy/mean_difference")
    if mean is not None and not mean <= MAX_MEAN_DIFFERENCE:  # also for NaN
        warnings.warn(
            f"the rollout of step {step} is off policy: probabilities differ by {mean:.2g} in the mean "
            f"(limit {MAX_MEAN_DIFFERENCE:g}); the servers do not hold the trainer's weights",
            OffPolicy,
            stacklevel=2,
        )
