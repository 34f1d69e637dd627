# SPDX-License-Identifier: Apache-2.0
"""Acceptance of draft tokens, measured while the engine runs.

Kept as S[i], the probability that the i-th draft token is accepted where i may be drafted: the budget sums it. Tokens
are counted in the order in which they are drafted, along a line or through a tree. A draft that is shorter than allowed
counts as if all allowed tokens had been tried, because a larger budget would not have made it longer. A token that was
rarely allowed is assumed to lose as much as the one before it. Otherwise larger drafts would never be tried.

Invariants
  1. S[0] = 1, and S never grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from seer.speculation.throughput import MAX_TOKENS

SPREAD = 0.5
"""How much less the slowest requests of a large batch accept: chosen over recorded responses (docs/log.md)."""


def slowest_survival(survival: Sequence[float], num_requests: int) -> list[float]:
    """S of the slowest of so many requests, where the S of all is known: later tokens are accepted by the fastest."""
    power = 1.0 + SPREAD * (1.0 - 1.0 / num_requests)
    return [share**power for share in survival]


class AcceptanceTracker:
    """Decayed counts by draft token: allowed, and accepted."""

    def __init__(self, *, prior_acceptance: float = 0.5, prior_weight: float = 8.0, half_life: float = 512.0) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        """Per observed draft: the last `half_life` drafts have half of the weight."""
        self._prior_acceptance, self._prior_weight = prior_acceptance, prior_weight
        self._tried = [0.0] * MAX_TOKENS
        self._accepted = [0.0] * MAX_TOKENS

    def observe(self, num_allowed: int, accepted: Iterable[int]) -> None:
        """Count one draft that was allowed `num_allowed` tokens; the accepted ones by their place, from 0."""
        for place in range(min(num_allowed, MAX_TOKENS)):  # called for every request of a step: no allocation
            self._tried[place] = self._tried[place] * self._decay + 1.0
            self._accepted[place] *= self._decay
        for place in accepted:
            assert place < num_allowed, f"token {place} accepted, {num_allowed} allowed"
            if place < MAX_TOKENS:
                self._accepted[place] += 1.0

    def observe_many(self, tried: Sequence[int], accepted: Sequence[int]) -> None:
        """Count many drafts at once: how often each token was allowed and accepted. Their order is unknown."""
        for place, (allowed, hits) in enumerate(zip(tried[:MAX_TOKENS], accepted, strict=False)):
            if allowed:
                fade = self._decay**allowed
                weight = (1.0 - fade) / (1.0 - self._decay)
                self._tried[place] = self._tried[place] * fade + weight
                self._accepted[place] = self._accepted[place] * fade + weight * hits / allowed

    def survival(self) -> list[float]:
        """S[0..MAX_TOKENS]."""
        survival, rate = [1.0], self._prior_acceptance
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            guess = survival[-1] * rate
            reached = (accepted + self._prior_weight * guess) / (tried + self._prior_weight)
            rate = min(1.0, reached / survival[-1])
            survival.append(survival[-1] * rate)
        return survival
