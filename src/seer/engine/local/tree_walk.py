# SPDX-License-Identifier: Apache-2.0
"""Accept draft nodes: walk down a draft tree by the sampled tokens.

At every node a token was sampled with the noise of its position, as plain decoding would after that node. So the token
sampled at the root is the one that plain decoding samples. If a child carries that token, the sample at that child is
the next token of plain decoding, and so on down. The tokens therefore equal those of plain decoding, and so does their
distribution. There is no random acceptance test.

Invariants
  1. Each emitted token was sampled at the row of the token before it.
  2. At most `max_tokens` are emitted, and none after a stop token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from seer.drafting.base import DraftTree


@dataclass(frozen=True, slots=True)
class Walk:
    """The path taken through a tree."""

    rows: list[int]
    """Rows sampled from, 0 for the root and 1 + i for node i; one per emitted token."""
    nodes: list[int]
    """Accepted nodes, in order."""
    stopped: bool
    """The last emitted token is a stop token, or completes a stop string."""

    def cut(self, num_tokens: int) -> Walk:
        """The walk ends with this many emitted tokens, by a stop string."""
        return Walk(self.rows[:num_tokens], self.nodes[: num_tokens - 1], stopped=True)


def walk(tree: DraftTree | None, sampled: Sequence[int], max_tokens: int, stop_ids: Collection[int]) -> Walk:
    """Follow the sampled tokens; `sampled[0]` is the root's, `sampled[1 + i]` node i's."""
    rows, nodes, token = [0], [], sampled[0]
    if tree is not None:
        at: int | None = None
        # Children come after their parent and siblings differ, so one pass finds the path.
        for node, parent in enumerate(tree.parents):
            if parent != at or tree.tokens[node] != token:
                continue
            if token in stop_ids or len(rows) >= max_tokens:
                break
            nodes.append(node)
            rows.append(1 + node)
            at, token = node, sampled[1 + node]
    return Walk(rows, nodes, stopped=token in stop_ids)
