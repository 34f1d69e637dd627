# SPDX-License-Identifier: Apache-2.0
"""The paper's marginal-benefit-aware rule (MBA), as printed in Algorithm 1.

With B_h probes and B_l others, acceptance β per position, γ_max = 8 and λ = 2:

    γ* = argmin over γ of T_SD(B, γ)                      T_SD = (1 - α)(D(B,γ) + T(B,γ)) / (1 - α^(γ+1))
    budget = γ*·B;  if budget < B_h: no speculation
    γ_h, γ_l, left = 1, 0, budget - B_h
    while left > 0:
        benefit_h = B_h·(β[γ_h] - β[γ_h+1]);  benefit_l = B_l·(β[γ_l] - β[γ_l+1])
        if benefit_h > λ·benefit_l and γ_h < γ_max and left >= B_h:  γ_h += 1, left -= B_h
        elif B_l > 0 and γ_l < γ_max and left >= B_l:                γ_l += 1, left -= B_l
        else: break

Our reading: β[i] is the probability that the first i are all accepted, β[0] = 1, and beyond γ_max β stays as it is; the
paper leaves both ends undefined. Without others, probes get γ*. The rule compares drops of β, with λ on the others'
side. So with a falling β it often gives probes fewer tokens than the others, against its stated aim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from seer.speculation.throughput import (
    MAX_DEPTH,
    NO_DRAFT,
    BatchClass,
    DraftLimits,
    DraftSize,
    StepCost,
    best_depth,
)

PRIORITY = 2.0
"""Weight of the others' benefit: the paper's λ."""


class Depths(NamedTuple):
    """Draft tokens per request and step, by class: γ_h and γ_l."""

    probes: int
    others: int


def paper(cost: StepCost, classes: Sequence[BatchClass], limits: DraftLimits) -> list[DraftSize]:
    """Sizes by the paper's rule: linear drafts, one depth for probes and one for the others."""
    num_probes = sum(one.num_requests for one in classes if one.is_probe)
    num_others = sum(one.num_requests for one in classes if not one.is_probe)
    beta = mean_survival(classes)
    depth = best_depth(cost, num_probes + num_others, beta, limits.up_to(MAX_DEPTH))
    if depth == 0:
        return [NO_DRAFT] * len(classes)
    depths = share_out(num_probes, num_others, beta, depth * (num_probes + num_others))
    return [DraftSize(limits.at_most(depths.probes if one.is_probe else depths.others)) for one in classes]


def share_out(num_probes: int, num_others: int, beta: Sequence[float], budget_tokens: int) -> Depths:
    """Share a budget of draft tokens between probes and others."""
    if budget_tokens < num_probes:
        return Depths(0, 0)
    known = beta[: MAX_DEPTH + 1]
    beta = [*known, *([known[-1]] * (MAX_DEPTH + 2 - len(known)))]
    probes, others = (1 if num_probes else 0), 0
    left = budget_tokens - num_probes
    while left > 0:
        benefit_probes = num_probes * (beta[probes] - beta[probes + 1])
        benefit_others = num_others * (beta[others] - beta[others + 1])
        prefers_probes = benefit_probes > PRIORITY * benefit_others or not num_others
        if num_probes and prefers_probes and probes < MAX_DEPTH and left >= num_probes:
            probes += 1
            left -= num_probes
        elif num_others and others < MAX_DEPTH and left >= num_others:
            others += 1
            left -= num_others
        else:
            break
    return Depths(probes, others)


def mean_survival(classes: Sequence[BatchClass]) -> list[float]:
    """S of linear drafts over the whole batch."""
    num_requests = sum(one.num_requests for one in classes)
    columns = zip(*(one.acceptance.line for one in classes), strict=False)
    weights = [one.num_requests / num_requests for one in classes]
    return [sum(w * s for w, s in zip(weights, column, strict=True)) for column in columns]
