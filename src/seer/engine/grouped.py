"""The grouped suffix index as the engine's drafter: what siblings have said, drafted for each other.

A thin face: the index and its exchange between instances are in `seer.drafting`. `observe` and `draft` touch the
local index only, so a step never waits for a server.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seer.drafting.client import DraftClient
from seer.drafting.index import DraftOptions
from seer.engine.drafter import DraftAsk, DraftTree

EMPTY = DraftTree()


class GroupedDrafter:
    """Drafts from a `DraftClient`. Implements `seer.engine.drafter.Drafter`."""

    def __init__(self, client: DraftClient, options: DraftOptions | None = None) -> None:
        self.client = client
        self.options = options or DraftOptions()
        """`paths` here is overridden by what the budget allows."""

    def observe(self, group: int, request: int, tokens: Sequence[int], *, start: int) -> None:
        """Add a response's tokens to the index; known ones cost nothing."""
        self.client.observe(group, request, np.asarray(tokens, np.int32), previous_count=start)

    def draft(self, asks: Sequence[DraftAsk]) -> list[DraftTree]:
        """Look all requests up in one call."""
        if not asks:
            return []
        options = self.options
        paths = max(ask.max_paths for ask in asks)
        if paths != options.paths:
            options = DraftOptions(
                paths=paths,
                min_confidence=options.min_confidence,
                match_min=options.match_min,
                match_max=options.match_max,
            )
        budgets = np.array([max(0, ask.max_tokens) for ask in asks], np.int32)
        batch = self.client.draft([(ask.group, ask.request) for ask in asks], budgets, options=options)
        tokens, parents = batch.tokens.tolist(), batch.parents.tolist()
        confidence, counts = batch.confidence.tolist(), batch.counts.tolist()
        return [
            DraftTree(
                tokens[row][:count],
                [parent if parent >= 0 else None for parent in parents[row][:count]],
                confidence[row][:count],
            )
            if count
            else EMPTY
            for row, count in enumerate(counts)
        ]

    def forget(self, request: int) -> None:
        """Keep it: what a request said helps its siblings until the group is dropped."""
