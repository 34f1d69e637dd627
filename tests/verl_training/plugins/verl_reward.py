# SPDX-License-Identifier: Apache-2.0
"""The reward of the toy (verl_toy.py), in a file of its own: verl loads it by path in its reward workers."""

from __future__ import annotations

from typing import Any

WANTED = {"even": "02468", "odd": "13579"}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Share of the response's words that are digits of the kind that was asked for; of a kind that is not there, 0."""
    words = solution_str.split()
    wanted = WANTED.get(ground_truth, "")
    return sum(word in wanted for word in words) / max(1, len(words))


def unused(*_: Any, **__: Any) -> float:
    """For runs whose environment gives the rewards."""
    return -100.0
