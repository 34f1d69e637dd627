# SPDX-License-Identifier: Apache-2.0
"""Weights versions from verl's step numbers: verl sends the weights of step 0 before the first rollout."""


def weights_version(global_steps: int) -> int:
    """The version of the weights that verl sent for this step; 0 is what an engine holds before the first sync."""
    return global_steps + 1


def rollout_version(step: int, is_validation: bool) -> int:
    """The version that a rollout must have: verl samples step k from the weights of step k - 1 and validates with k."""
    return weights_version(step if is_validation else step - 1)


def global_steps(weights_version: int) -> int:
    """The step whose weights have this version."""
    return weights_version - 1
