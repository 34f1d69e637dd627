# SPDX-License-Identifier: Apache-2.0
"""How many draft tokens a step may verify: the paper's throughput model, and the rules that share the tokens out.

Symbols (paper §4.1)
    B      requests in the batch: B_h probes (high priority), B_l others
    γ      draft tokens per request and step; γ = 0 means no speculation
    S[i]   probability that the first i draft tokens are all accepted; S[0] = 1
    T(B,n) time of a step that carries n tokens per request; D(B,γ) time to make the drafts
    τ(γ)   tokens gained per request and step, the bonus token included: S[0] + S[1] + ... + S[γ]

Time per token is (D + T(B, 1+γ)) / τ(γ); speculation pays where that is below T(B, 1). With a constant acceptance rate
α, S[i] = α^i and τ is the paper's (1 - α^(γ+1)) / (1 - α).

Pure functions. Engines use `best_depth` with measured costs and acceptance (seer.drafting.live_budget). Only the
simulator uses `allot` and its rules, which give probes and others different depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from seer.errors import ConfigError

MAX_DEPTH = 8
"""Most draft tokens per request, the paper's γ_max."""

PRIORITY = 2.0
"""Weight of a probe's draft token relative to another's: the paper's λ. Probes first, but not only probes."""

Rule = Literal["paper", "marginal", "threshold"]


class StepCost(Protocol):
    """What a step costs on one instance, by batch size and tokens per request."""

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        """Seconds of one forward pass."""

    def draft_s(self, num_requests: int, depth: float) -> float:
        """Seconds to draft for it."""


@dataclass(frozen=True, slots=True)
class Depths:
    """Draft tokens per request and step, by class."""

    probes: int
    others: int

    @property
    def off(self) -> bool:
        """Whether nothing is drafted."""
        return self.probes == 0 and self.others == 0


OFF = Depths(0, 0)
"""No speculation."""


def geometric_survival(acceptance: float, max_depth: int = MAX_DEPTH) -> list[float]:
    """S under a constant acceptance rate."""
    return [acceptance**i for i in range(max_depth + 1)]


def tokens_per_step(survival: Sequence[float], depth: int) -> float:
    """τ: tokens gained per request and step with drafts of this depth."""
    return sum(survival[: depth + 1])


def time_per_token_s(cost: StepCost, num_requests: int, survival: Sequence[float], depth: int) -> float:
    """T_SD: seconds per gained token with drafts of this depth; depth 0 is plain decoding."""
    if depth == 0:
        return cost.step_s(num_requests, 1)
    step_s = cost.step_s(num_requests, 1 + depth) + cost.draft_s(num_requests, depth)
    return step_s / tokens_per_step(survival, depth)


def best_depth(
    cost: StepCost,
    num_requests: int,
    survival: Sequence[float],
    max_depth: int = MAX_DEPTH,
    *,
    depths: Sequence[int] | None = None,
) -> int:
    """γ*: the depth with the least time per token. 0 where speculation does not pay.

    `depths` are the depths to choose from, for an engine that pads all others up to one of them.
    """
    if num_requests == 0:
        return 0
    deepest = min(max_depth, len(survival) - 1)
    return min(
        range(deepest + 1) if depths is None else [depth for depth in depths if depth <= deepest],
        key=lambda depth: (time_per_token_s(cost, num_requests, survival, depth), depth),
    )


def allot(
    rule: Rule,
    cost: StepCost,
    num_probes: int,
    num_others: int,
    survival: Sequence[float],
    *,
    max_depth: int = MAX_DEPTH,
    priority: float = PRIORITY,
) -> Depths:
    """Depths for the two classes by a rule, from the budget of γ*·B tokens."""
    num_requests = num_probes + num_others
    depth = best_depth(cost, num_requests, survival, max_depth)
    if depth == 0:
        return OFF
    if rule == "threshold":
        return threshold(num_requests, per_request=max_depth, per_batch=depth * num_requests)
    share = paper if rule == "paper" else marginal
    return share(num_probes, num_others, survival, depth * num_requests, max_depth=max_depth, priority=priority)


def paper(
    num_probes: int,
    num_others: int,
    survival: Sequence[float],
    budget_tokens: int,
    *,
    max_depth: int = MAX_DEPTH,
    priority: float = PRIORITY,
) -> Depths:
    """The paper's MBA rule as printed (Alg. 1), with β[0] = 1, which the paper leaves undefined.

    It compares *drops* of β weighted by class size, with λ on the others' side. If β falls geometrically, this often
    gives probes fewer tokens than the others, against its stated aim. We believe that `marginal` is the intended rule.
    """
    if budget_tokens < num_probes or budget_tokens == 0:
        return OFF
    beta = [*survival, *([survival[-1]] * (max_depth + 2 - len(survival)))]
    probes, others = (1 if num_probes else 0), 0
    left = budget_tokens - num_probes
    while left > 0:
        gain_probes = num_probes * (beta[probes] - beta[probes + 1])
        gain_others = num_others * (beta[others] - beta[others + 1])
        prefers_probes = gain_probes > priority * gain_others or not num_others
        if num_probes and prefers_probes and probes < max_depth and left >= num_probes:
            probes += 1
            left -= num_probes
        elif num_others and others < max_depth and left >= num_others:
            others += 1
            left -= num_others
        else:
            break
    return Depths(probes, others)


def marginal(
    num_probes: int,
    num_others: int,
    survival: Sequence[float],
    budget_tokens: int,
    *,
    max_depth: int = MAX_DEPTH,
    priority: float = PRIORITY,
) -> Depths:
    """Give each next draft position to the class in which a token is worth more: compare λ·S[γ_h+1] with S[γ_l+1]."""
    reach = [*survival, *([0.0] * (max_depth + 2 - len(survival)))]
    probes = others = 0
    left = budget_tokens
    while True:
        can_probes = num_probes and probes < max_depth and left >= num_probes
        can_others = num_others and others < max_depth and left >= num_others
        if can_probes and (not can_others or priority * reach[probes + 1] >= reach[others + 1]):
            probes += 1
            left -= num_probes
        elif can_others:
            others += 1
            left -= num_others
        else:
            return Depths(probes, others)


def threshold(num_requests: int, *, per_request: int, per_batch: int) -> Depths:
    """Two fixed limits on draft tokens, per request and per batch: the rule of the paper's first version."""
    if per_request < 0 or per_batch < 0:
        raise ConfigError(f"per_request={per_request} and per_batch={per_batch} draft tokens must be 0 or more")
    depth = min(per_request, per_batch // num_requests) if num_requests else 0
    return Depths(depth, depth)
