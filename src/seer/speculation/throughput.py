# SPDX-License-Identifier: Apache-2.0
"""The throughput model that every budget rule uses: what a batch gains per second with given drafts.

Symbols (paper §4.1)
    B      requests in the batch
    γ      draft tokens per request and step; γ = 0 means no speculation
    S[i]   probability that the i-th draft token is accepted; S[0] = 1 stands for the token sampled in any case
    T(B,n) time of a step that carries n tokens per request; D(B,γ) time to make the drafts
    τ(γ)   tokens gained per request and step: S[0] + S[1] + ... + S[γ]

A linear draft's i-th token is accepted if the first i all are: with a constant acceptance rate α, S[i] = α^i and τ is
the paper's (1 - α^(γ+1)) / (1 - α). In a tree the i-th token is the i-th node in the order in which nodes are drafted.
So one model serves lines and trees, and a step costs the same for either.

    tokens per second = (sum over requests of τ) / (D + T(B, 1 + mean γ))

For one class this is B over the paper's time per token T_SD = (1 - α)(D + T) / (1 - α^(γ+1)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

MAX_DEPTH = 8
"""Most draft tokens per request of the paper's rules, its γ_max."""
MAX_TOKENS = 16
"""Most draft tokens per request that engines draft: in the tail, where a step costs the same for 16 as for one."""
MAX_PATHS = 4
"""Most paths of a draft: the paper's Table 2 has 1, 2 and 4."""


class StepCost(Protocol):
    """What a step costs on one instance, by batch size and tokens per request."""

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        """Seconds of one forward pass."""

    def draft_s(self, num_requests: int, depth: float) -> float:
        """Seconds to draft for it."""


class DraftSize(NamedTuple):
    """How much to draft for a request: tokens to verify, on up to this many paths."""

    tokens: int
    paths: int = 1


NO_DRAFT = DraftSize(0)


@dataclass(frozen=True, eq=False)
class Acceptance:
    """The probability S[i] that the i-th draft token is accepted, by number of paths. S[0] = 1, and S never grows.

    Compared by identity, so that what is computed from it can be kept.
    """

    by_paths: Mapping[int, Sequence[float]]

    @cached_property
    def gains(self) -> Mapping[int, list[float]]:
        """τ by number of paths and of draft tokens."""
        return {paths: list(accumulate(survival)) for paths, survival in self.by_paths.items()}

    @property
    def line(self) -> Sequence[float]:
        """S of linear drafts; of the fewest paths known where lines are not."""
        return self.by_paths[min(self.by_paths)]

    def gain(self, size: DraftSize) -> float:
        """τ: tokens gained per request and step with drafts of this size; of the fewest paths known for others."""
        gains = self.gains.get(size.paths) or self.gains[min(self.gains)]
        return gains[min(size.tokens, len(gains) - 1)]


def linear(survival: Sequence[float]) -> Acceptance:
    """Acceptance of drafts of one path."""
    return Acceptance({1: survival})


@dataclass(frozen=True, slots=True)
class BatchClass:
    """Requests of a batch with the same acceptance."""

    num_requests: int
    acceptance: Acceptance
    is_probe: bool = False


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What an engine can verify."""

    choices: tuple[int, ...] = tuple(range(MAX_DEPTH + 1))
    """Draft tokens per request to choose from, in rising order: engines pad others up to one of them."""
    max_paths: int = 1
    is_uniform: bool = False
    """Every request of a step gets the same number of tokens, by padding."""

    def __post_init__(self) -> None:
        """Check the choices."""
        assert self.choices == tuple(sorted(set(self.choices))) != (), f"choices {self.choices} must rise"

    def up_to(self, max_tokens: int) -> list[int]:
        """The choices of at most so many tokens."""
        return [tokens for tokens in self.choices if tokens <= max_tokens]

    def at_most(self, num_tokens: int) -> int:
        """The largest choice of at most so many tokens; the smallest where all are larger."""
        return max(self.up_to(num_tokens), default=self.choices[0])


def geometric_survival(acceptance: float, max_depth: int = MAX_DEPTH) -> list[float]:
    """S of a linear draft under a constant acceptance rate."""
    return [acceptance**i for i in range(max_depth + 1)]


def tokens_per_step(survival: Sequence[float], depth: int) -> float:
    """τ: tokens gained per request and step with drafts of this depth."""
    return sum(survival[: depth + 1])


def tokens_per_s(cost: StepCost, classes: Sequence[BatchClass], sizes: Sequence[DraftSize]) -> float:
    """Tokens that the batch gains per second, each class with its own size of drafts."""
    gained = sum(one.num_requests * one.acceptance.gain(size) for one, size in zip(classes, sizes, strict=True))
    drafted = sum(one.num_requests * size.tokens for one, size in zip(classes, sizes, strict=True))
    return gained / step_with_drafts_s(cost, sum(one.num_requests for one in classes), drafted)


def step_with_drafts_s(cost: StepCost, num_requests: int, num_draft_tokens: float) -> float:
    """D + T: seconds of a step that verifies this many draft tokens in all."""
    depth = num_draft_tokens / num_requests
    step_s = cost.step_s(num_requests, 1 + depth)
    return step_s + cost.draft_s(num_requests, depth) if num_draft_tokens else step_s


def best_depth(cost: StepCost, num_requests: int, survival: Sequence[float], choices: Sequence[int]) -> int:
    """γ*: the depth of linear drafts with the least time per token. 0 where speculation does not pay."""

    def time_per_token_s(depth: int) -> float:
        return step_with_drafts_s(cost, num_requests, depth * num_requests) / tokens_per_step(survival, depth)

    known = [depth for depth in choices if depth < len(survival)]
    return min(known, key=lambda depth: (time_per_token_s(depth), depth)) if num_requests else 0
