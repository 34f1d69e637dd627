"""What became of the drafts: how often each draft position was accepted, learned while it runs.

Kept as survival S[i], the probability that the first i draft tokens were all accepted, because that is what the budget
sums. A position is counted only when a draft reached it, so short drafts do not read as rejections of longer ones, and
one that few drafts have reached is taken to fare like the one before it: a draft that was right so far goes on being
right as often or more, and depth that pays would never be tried otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from seer.speculation.budget import MAX_DEPTH


class AcceptanceTracker:
    """Decayed counts of drafted and accepted tokens by position."""

    def __init__(self, *, prior_acceptance: float = 0.5, prior_weight: float = 8.0, half_life: float = 512.0) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        """Per observed draft: half of the weight is younger than `half_life` drafts."""
        self._prior_acceptance, self._prior_weight = prior_acceptance, prior_weight
        self._tried = [0.0] * MAX_DEPTH
        self._accepted = [0.0] * MAX_DEPTH

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """A linear draft of `num_drafted` tokens had its first `num_accepted` accepted."""
        assert 0 <= num_accepted <= num_drafted, f"{num_accepted} of {num_drafted} drafts accepted"
        for position in range(min(num_drafted, MAX_DEPTH)):
            if position > num_accepted:
                break  # never reached: says nothing about this position
            hit = position < num_accepted
            self._tried[position] = self._tried[position] * self._decay + 1.0
            self._accepted[position] = self._accepted[position] * self._decay + hit

    def observe_many(self, tried: Sequence[int], accepted: Sequence[int]) -> None:
        """Many drafts at once: how often each position was reached, and accepted; their order is not known."""
        for position, (reached, hits) in enumerate(zip(tried[:MAX_DEPTH], accepted, strict=False)):
            if reached:
                fade = self._decay**reached
                weight = (1.0 - fade) / (1.0 - self._decay)
                self._tried[position] = self._tried[position] * fade + weight
                self._accepted[position] = self._accepted[position] * fade + weight * hits / reached

    def survival(self) -> list[float]:
        """S[0..MAX_DEPTH]."""
        survival, rate = [1.0], self._prior_acceptance
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            rate = (accepted + self._prior_weight * rate) / (tried + self._prior_weight)
            survival.append(survival[-1] * rate)
        return survival
