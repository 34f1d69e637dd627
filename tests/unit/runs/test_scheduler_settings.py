# SPDX-License-Identifier: Apache-2.0
"""Settings of a scheduler over instances that differ."""

from __future__ import annotations

from builders import limits
from seer.runs.run import longest_context, scheduler_settings


def test_instances_count_as_balanced_by_the_smallest_and_requests_as_fitting_by_the_largest() -> None:
    unlike = [limits(100, max_num_seqs=64), limits(10, max_num_seqs=16), limits(20, max_num_seqs=32, max_model_len=700)]
    for order in (unlike, unlike[::-1]):
        settings = scheduler_settings(None, order, 8000, None)
        assert settings.placement.imbalance_threshold == 2
        assert settings.chunk_tokens == 1024
        assert longest_context(order) == 6400
