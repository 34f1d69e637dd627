"""What became of the drafts: how often so many tokens were accepted, learned while it runs.

Kept as survival S[i], the probability that i draft tokens or more are accepted where as many may be drafted, because
that is what the budget sums. A draft that is shorter than it might have been counts in full: a deeper budget would not
have brought more. A depth that few drafts were allowed to have is taken to lose as much as the one before it: a draft
that was right so far goes on being right as often or more, and depth that pays would never be tried otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from seer.speculation.budget import MAX_DEPTH


class AcceptanceTracker:
    """Decayed counts of drafts by depth: allowed, and accepted."""

    def __init__(self, *, prior_acceptance: float = 0.5, prior_weight: float = 8.0, half_life: float = 512.0) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        """Per observed draft: half of the weight is younger than `half_life` drafts."""
        self._prior_acceptance, self._prior_weight = prior_acceptance, prior_weight
        self._tried = [0.0] * MAX_DEPTH
        self._accepted = [0.0] * MAX_DEPTH

    def observe(self, num_allowed: int, num_accepted: int) -> None:
        """Of a draft that might have had `num_allowed` tokens so many were accepted."""
        assert 0 <= num_accepted <= num_allowed, f"{num_accepted} of {num_allowed} draft tokens accepted"
        for depth in range(min(num_allowed, MAX_DEPTH)):  # asked for every request of a step: nothing is built for it
            self._tried[depth] = self._tried[depth] * self._decay + 1.0
            self._accepted[depth] = self._accepted[depth] * self._decay + (depth < num_accepted)

    def observe_many(self, tried: Sequence[int], accepted: Sequence[int]) -> None:
        """Many drafts at once: how often each depth was allowed, and accepted; their order is not known."""
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
