"""What became of the drafts: how often each token of a draft was accepted, learned while it runs.

Kept as survival S[i]: how often the i-th token of a draft that was allowed i tokens or more was accepted. For a line
that is the probability that its first i tokens all were; a tree lists its likeliest nodes first and any prefix of it is
a tree, so what was seen of a large draft holds for every smaller one. A draft that ended earlier, or was not there at
all, counts as one whose further tokens were refused: nothing was gained by allowing them.
"""

from __future__ import annotations

from collections.abc import Iterable

from seer.speculation.budget import MAX_DEPTH


class AcceptanceTracker:
    """Decayed counts of allowed and accepted tokens by their place in the draft."""

    def __init__(self, *, prior_acceptance: float = 0.6, prior_weight: float = 4.0, half_life: float = 256.0) -> None:
        # High and light: drafts are tried before they are judged, and a few bad ones are enough to stop them.
        self._prior_acceptance = prior_acceptance
        self._prior_weight = prior_weight
        self._decay = 0.5 ** (1.0 / half_life)
        """Per observed draft: half of the weight is younger than `half_life` drafts."""
        self._tried = [0.0] * MAX_DEPTH
        self._accepted = [0.0] * MAX_DEPTH
        # Seen since the counts were last asked for: observing happens for every request of every step.
        self._new_tried = [0] * (MAX_DEPTH + 1)  # by tokens allowed
        self._new_accepted = [0] * MAX_DEPTH

    def observe(self, num_allowed: int, accepted: Iterable[int]) -> None:
        """Of a draft that was allowed so many tokens, the ones at these places, from 0, were accepted."""
        self._new_tried[min(num_allowed, MAX_DEPTH)] += 1
        for place in accepted:
            if place < MAX_DEPTH:
                self._new_accepted[place] += 1

    def survival(self) -> list[float]:
        """S[0..MAX_DEPTH]; what was never tried goes on as the tokens before it did."""
        self._fold()
        survival, ratio = [1.0], self._prior_acceptance
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            expected = self._prior_weight * survival[-1] * ratio
            survival.append((accepted + expected) / (tried + self._prior_weight))
            ratio = min(1.0, survival[-1] / survival[-2])
        return survival

    def _fold(self) -> None:
        num_reaching = 0
        for place in range(MAX_DEPTH - 1, -1, -1):
            num_reaching += self._new_tried[place + 1]
            if not num_reaching:
                continue
            kept = self._decay**num_reaching
            # The new ones weigh as if they had come one after the other.
            weight = (1.0 - kept) / (1.0 - self._decay) / num_reaching
            self._tried[place] = self._tried[place] * kept + num_reaching * weight
            self._accepted[place] = self._accepted[place] * kept + self._new_accepted[place] * weight
        if num_reaching:
            self._new_tried = [0] * (MAX_DEPTH + 1)
            self._new_accepted = [0] * MAX_DEPTH
