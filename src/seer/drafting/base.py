# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of a drafter, and what it gets: trees of proposed tokens.

A drafter guesses how a request continues, from what its group has generated. The engine verifies every guess
against the model: a drafter changes the speed of a rollout and nothing else.

Rules
  1. A tree's nodes are ordered parents first; `parents[i]` is the index of node i's parent, or None for a
     child of the request's last known token. Siblings carry different tokens.
  2. `observe` gets final tokens only, each at least once; `start` makes a second time harmless.
  3. A drafter that fails or has nothing to propose returns an empty tree; it never waits for another process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Proposed continuations of one request; a linear draft is the tree whose every node has one child."""

    tokens: Sequence[int] = ()
    parents: Sequence[int | None] = ()
    confidence: Sequence[float] | None = None
    """The drafter's own estimate that each node is reached, where it has one."""

    def __post_init__(self) -> None:
        """A node follows its parent, so that one pass over the tree meets ancestors first."""
        assert len(self.tokens) == len(self.parents), f"{len(self.tokens)} tokens, {len(self.parents)} parents"
        for node, parent in enumerate(self.parents):
            assert parent is None or 0 <= parent < node, f"node {node} has parent {parent}"

    @classmethod
    def linear(cls, tokens: Sequence[int]) -> DraftTree:
        """The tree of one path."""
        return cls(tokens, [index - 1 if index else None for index in range(len(tokens))])

    def depths(self) -> list[int]:
        """How far each node is below the request's last known token; 1 for its children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent is None else depths[parent] + 1)
        return depths

    def pruned(self, max_tokens: int, max_depth: int) -> DraftTree:
        """The tree without nodes too deep to be used, cut to its first `max_tokens` nodes."""
        if len(self.tokens) <= min(max_tokens, max_depth):  # no node is deeper than there are nodes
            return self
        depths = self.depths()
        if len(depths) <= max_tokens and max(depths) <= max_depth:
            return self
        kept = [node for node, depth in enumerate(depths) if depth <= max_depth][:max_tokens]
        place: dict[int | None, int | None] = {node: index for index, node in enumerate(kept)}
        place[None] = None
        return DraftTree(
            [self.tokens[node] for node in kept],
            [place[self.parents[node]] for node in kept],
            None if self.confidence is None else [self.confidence[node] for node in kept],
        )


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """One request that could use a draft now."""

    group: int
    request: int
    context: Sequence[int]
    """Prompt and everything generated so far; read it during the call only."""
    num_prompt_tokens: int
    max_tokens: int
    max_paths: int = 1


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much may be drafted for each request of the next step."""

    max_tokens: int
    max_paths: int = 1
    max_steps: int | None = None
    """Steps it is valid for, where an engine makes several at once; None for any number."""
    max_probe_tokens: int | None = None
    """For probes; None: as for the others."""

    @property
    def most(self) -> int:
        """Most tokens that any request may draft."""
        return max(self.max_tokens, self.max_probe_tokens or 0)

    def tokens_for(self, is_probe: bool) -> int:
        """Most tokens for a probe or for another request."""
        return self.max_probe_tokens if is_probe and self.max_probe_tokens is not None else self.max_tokens

    def cut(self, most: int) -> Allowance:
        """The same with at most so many tokens."""
        if self.most <= most:
            return self
        probes = self.max_probe_tokens
        return replace(
            self,
            max_tokens=min(self.max_tokens, most),
            max_probe_tokens=None if probes is None else min(probes, most),
        )


class Drafter(Protocol):
    """Proposes continuations; implemented by the grouped suffix index and by small fakes in tests."""

    def observe(self, group: int, request: int, tokens: Sequence[int], *, start: int) -> None:
        """Learn final tokens of a response; `start` is how many tokens of it come before them."""

    def draft(self, asks: Sequence[DraftAsk]) -> Sequence[DraftTree]:
        """One tree per ask, in order; an empty one where there is nothing to propose."""

    def forget(self, request: int) -> None:
        """The request left this instance; what the group learnt from it may stay."""


@runtime_checkable
class FollowsGroups(Protocol):
    """A drafter that drafts from prompts and from siblings that run elsewhere."""

    def register(self, group: int, request: int, prompt: Sequence[int]) -> None:
        """A request of a group has arrived; called for each of its chunks."""


@runtime_checkable
class DeferredIndexing(Protocol):
    """A drafter that can index later, while a device computes."""

    def learn(self) -> None:
        """Index what was observed; called between a step's start and its end, any number of times."""


class DraftTable(NamedTuple):
    """Trees of several requests: row i holds counts[i] nodes; a parent is a column of the row, -1 for no parent."""

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    counts: NDArray[np.int32]


class DraftSession(Protocol):
    """Drafts for the same requests, step after step; rows and offsets are in the order of the asks."""

    def draft(self, limits: NDArray[np.int32]) -> DraftTable:
        """One tree per request, of at most so many nodes; of none where there is nothing to propose. Does not fail."""

    def observe(self, tokens: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
        """Request i continued with tokens[offsets[i]:offsets[i+1]], final tokens."""

    def close(self, tried: Sequence[int], taken: Sequence[int]) -> None:
        """No more steps. For each node, in the order drafted: how often it was allowed, and how often accepted."""


@runtime_checkable
class OpensSessions(Protocol):
    """A drafter that can serve several steps without being asked for one request at a time."""

    def open_session(self, asks: Sequence[DraftAsk]) -> DraftSession:
        """Draft for these requests. What the session observes is indexed and need not be observed again."""


class RunningBatch(NamedTuple):
    """The requests of the next step that decode."""

    num_requests: int
    num_probes: int = 0
    is_refilled: bool = True
    """Other requests wait: where one ends, another enters."""


DraftBudget = Callable[[RunningBatch], Allowance]
"""Asked once per step, answered from measured step costs."""
