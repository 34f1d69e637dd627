"""What became of the drafts: how often each draft position was accepted, learned while it runs.

Kept as survival S[i], the probability that the first i draft tokens were all accepted, because that is what the budget
sums. A position is counted only when a draft reached it, so short drafts do not read as rejections of longer ones.
"""

from __future__ import annotations

from seer.speculation.budget import MAX_DEPTH


class AcceptanceTracker:
    """Decayed counts of drafted and accepted tokens by position."""

    def __init__(self, *, prior_acceptance: float = 0.5, prior_weight: float = 8.0, half_life: float = 512.0) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        """Per observed draft: half of the weight is younger than `half_life` drafts."""
        self._tried = [prior_weight] * MAX_DEPTH
        self._accepted = [prior_weight * prior_acceptance] * MAX_DEPTH

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """A linear draft of `num_drafted` tokens had its first `num_accepted` accepted."""
        assert 0 <= num_accepted <= num_drafted, f"{num_accepted} of {num_drafted} drafts accepted"
        for position in range(min(num_drafted, MAX_DEPTH)):
            if position > num_accepted:
                break  # never reached: says nothing about this position
            hit = position < num_accepted
            self._tried[position] = self._tried[position] * self._decay + 1.0
            self._accepted[position] = self._accepted[position] * self._decay + hit

    def survival(self) -> list[float]:
        """S[0..MAX_DEPTH]."""
        survival = [1.0]
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            survival.append(survival[-1] * accepted / tried)
        return survival
