"""Which depth to draft now: the one that measures best, or for once another, so that it goes on being known.

What pays is known only from steps that were made. So now and then a step is made that is believed to be worse: one
without drafts while drafting, one with drafts while not, or a token more or less than now. Each such trial loses
    (what its step takes) - (what the best choice needs for as many tokens)
and is made once TRIAL_SHARE of the time since the last of its kind has paid for that. So cheap trials come often, dear
ones seldom, and together they cost about a hundredth of the time, whatever the machine, the batch or the drafts.

Pure: time is the sum of what its answers are priced at, which a stall does not count towards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from seer.speculation.budget import StepCost, time_per_token_s, tokens_per_step

TRIAL_SHARE = 0.0015
"""Of the time, for each of three kinds of trial."""
MIN_GAIN = 0.03
"""Less than this is not worth drafting for: it is within what a measurement is off by, and to draft nothing is sure."""
MIN_LOSS_SHARE = 0.02
"""Of a step: what a trial is said to lose at least. Equals are not worth turning to and fro between."""

Kind = Literal["most different", "shallower", "deeper"]


class DepthChoice:
    """Remembers when each kind of trial was last made."""

    def __init__(self, depths: Sequence[int]) -> None:
        assert depths[0] == 0, "to draft nothing is always possible"
        assert len(depths) > 1, "a choice needs something to draft"
        self._depths = depths
        self._now_s = 0.0
        self._tried_s: dict[Kind, float] = {"most different": 0.0, "shallower": 0.0, "deeper": 0.0}
        self.burst_steps = 1
        """Steps that one answer of 0 leads to: engines make several at once where nothing is drafted."""

    def depth(self, cost: StepCost, num_requests: int, survival: Sequence[float]) -> int:
        """What to draft for each request now; asked once before each step that follows the answer."""
        if not num_requests:
            return 0
        per_token_s = [time_per_token_s(cost, num_requests, survival, depth) for depth in self._depths]
        near = min(range(1, len(per_token_s)), key=per_token_s.__getitem__)
        best = near if per_token_s[near] < (1.0 - MIN_GAIN) * per_token_s[0] else 0
        chosen = best
        for kind, other in self._others(near, pays=best > 0).items():
            loss_s = self._num_tokens(survival, other) * max(
                per_token_s[other] - per_token_s[best], MIN_LOSS_SHARE * per_token_s[other]
            )
            if (self._now_s - self._tried_s[kind]) * TRIAL_SHARE >= loss_s:
                self._tried_s[kind], chosen = self._now_s, other
                break
        self._now_s += self._num_tokens(survival, chosen) * per_token_s[chosen]
        return self._depths[chosen]

    def _num_tokens(self, survival: Sequence[float], choice: int) -> float:
        """What a request gains until the next question."""
        depth = self._depths[choice]
        return tokens_per_step(survival, depth) if depth else self.burst_steps

    def _others(self, near: int, *, pays: bool) -> dict[Kind, int]:
        """What is tried beside the best, about the draft that pays or comes nearest to it."""
        others: dict[Kind, int] = {"most different": 0 if pays else near}
        if near > 1:
            others["shallower"] = near - 1
        if near < len(self._depths) - 1:
            others["deeper"] = near + 1
        return others
