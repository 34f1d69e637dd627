# SPDX-License-Identifier: Apache-2.0
"""The rule of the paper's first version: two fixed limits on draft tokens, per request and per batch.

    depth = min(tokens per request, tokens per batch // B)

The limits are fixed beforehand for an architecture, dense or mixture of experts. The paper prints no values. These are
the best powers of two for `seer-paper` in the simulator (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seer.speculation.throughput import MAX_DEPTH, BatchClass, DraftLimits, DraftSize


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Most draft tokens of a step."""

    per_request: int
    per_batch: int


DENSE = Thresholds(per_request=MAX_DEPTH, per_batch=256)
MIXTURE = Thresholds(per_request=MAX_DEPTH, per_batch=512)
"""Of experts."""


def threshold(classes: Sequence[BatchClass], limits: DraftLimits, thresholds: Thresholds) -> list[DraftSize]:
    """Linear drafts of one depth for all."""
    num_requests = sum(one.num_requests for one in classes)
    depth = limits.at_most(min(thresholds.per_request, thresholds.per_batch // num_requests))
    return [DraftSize(depth)] * len(classes)
