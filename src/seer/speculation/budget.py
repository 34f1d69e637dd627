# SPDX-License-Identifier: Apache-2.0
"""How much each request of a step may draft. The only place that decides it, for engines and for the simulator.

Engines ask it with measured costs and acceptance (seer.drafting.live_budget, and seer.engine.vllm.gpu_drafts.depth for
drafts on the GPU), the simulator with modelled ones (seer.sim.speculation).

| rule      | sizes of drafts                                                                  |
|-----------|----------------------------------------------------------------------------------|
| seer      | those with the most tokens per second by the throughput model                    |
| paper     | the paper's rule as printed: a depth for probes and one for the others           |
| threshold | the rule of the paper's first version: fixed limits per request and per batch    |

Pure: the same costs, acceptance and batch give the same sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from seer.speculation.paper import paper
from seer.speculation.seer import seer
from seer.speculation.threshold import DENSE, Thresholds, threshold
from seer.speculation.throughput import BatchClass, DraftLimits, DraftSize, StepCost
from seer.types import BudgetRule


def allot(
    rule: BudgetRule,
    cost: StepCost,
    classes: Sequence[BatchClass],
    limits: DraftLimits,
    *,
    thresholds: Thresholds = DENSE,
) -> list[DraftSize]:
    """The size of the drafts of each class of requests, in order."""
    if not any(one.num_requests for one in classes):
        return [DraftSize(0)] * len(classes)
    if rule == "threshold":
        return threshold(classes, limits, thresholds)
    return paper(cost, classes, limits) if rule == "paper" else seer(cost, classes, limits)
