# SPDX-License-Identifier: Apache-2.0
"""Acceptance of drafts by depth, measured while the engine runs.

Kept as survival S[i], the probability that at least i draft tokens are accepted where i may be drafted: the budget sums
it. A draft that is shorter than allowed counts as if it had been tried at every allowed depth, because a deeper budget
would not have made it longer. A depth that was rarely allowed is assumed to have the acceptance rate of the depth
before it. Otherwise greater depths would never be tried.

Invariants
  1. S[0] = 1, and S never grows with depth.
"""

from __future__ import annotations

from collections.abc import Sequence

from seer.speculation.throughput import MAX_DEPTH


class AcceptanceTracker:
    """Decayed counts of drafts by depth: allowed, and accepted."""

    def __init__(self, *, prior_acceptance: float = 0.5, prior_weight: float = 8.0, half_life: float = 512.0) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        """Per observed draft: the last `half_life` drafts have half of the weight."""
        self._prior_acceptance, self._prior_weight = prior_acceptance, prior_weight
        self._tried = [0.0] * MAX_DEPTH
        self._accepted = [0.0] * MAX_DEPTH

    def observe(self, num_allowed: int, num_accepted: int) -> None:
        """Count one draft that was allowed `num_allowed` tokens."""
        assert 0 <= num_accepted <= num_allowed, f"{num_accepted} of {num_allowed} draft tokens accepted"
        for depth in range(min(num_allowed, MAX_DEPTH)):  # called for every request of a step: no allocation
            self._tried[depth] = self._tried[depth] * self._decay + 1.0
            self._accepted[depth] = self._accepted[depth] * self._decay + (depth < num_accepted)

    def observe_many(self, tried: Sequence[int], accepted: Sequence[int]) -> None:
        """Count many drafts at once: how often each depth was allowed and accepted. Their order is unknown."""
        for depth, (allowed, hits) in enumerate(zip(tried[:MAX_DEPTH], accepted, strict=False)):
            if allowed:
                fade = self._decay**allowed
                weight = (1.0 - fade) / (1.0 - self._decay)
                self._tried[depth] = self._tried[depth] * fade + weight
                self._accepted[depth] = self._accepted[depth] * fade + weight * hits / allowed

    def survival(self) -> list[float]:
        """S[0..MAX_DEPTH]."""
        survival, rate = [1.0], self._prior_acceptance
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            guess = survival[-1] * rate
            reached = (accepted + self._prior_weight * guess) / (tried + self._prior_weight)
            rate = min(1.0, reached / survival[-1])
            survival.append(survival[-1] * rate)
        return survival
