# SPDX-License-Identifier: Apache-2.0
"""What drafts a workload's model has: how well a group's texts predict it, and which plain speculation it is given.

The paper's Table 2 measured acceptance by number of references on one model. Other models repeat themselves less:
`level` scales the accepted drafts. Plain speculation (`+sd`) differs by model in the paper: a suffix tree over a
request's own text, a small draft model, or a draft head. A draft model or head proposes one token per pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from seer.ranges import DraftTokens, Probability, SecondsOrZero
from seer.speculation.throughput import MAX_DEPTH

Points = tuple[tuple[int, float], ...]
"""Number of references, and the mean acceptance length with them."""


def acceptance_for(length: float, depth: int) -> float:
    """The acceptance rate that gives this mean acceptance length with drafts of `depth` tokens, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**i for i in range(depth + 1)) < length:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainDrafts:
    """Plain speculation with a constant acceptance rate."""

    acceptance: Probability
    """Probability that a draft token is accepted, given that those before it were."""
    max_depth: DraftTokens = MAX_DEPTH
    """Most draft tokens per request and step."""
    pass_s: SecondsOrZero = 0.0
    """Seconds per draft token of a step: a pass of a draft model or head. 0: drafts come from an index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """Drafts of one workload."""

    level: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """Accepted draft tokens relative to Table 2, at any number of references."""
    plain: PlainDrafts | None = None
    """What `+sd` adds. None: drafts from a request's own text, accepted as Table 2 says for no reference."""

    def scaled(self, points: Points) -> Points:
        """Acceptance lengths of this model, from those of Table 2."""
        return tuple((references, 1.0 + self.level * (length - 1.0)) for references, length in points)
