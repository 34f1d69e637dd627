# SPDX-License-Identifier: Apache-2.0
"""Replay recorded groups: how many drafted tokens would have been accepted?

Exact, and needs no model. Verification is lossless and a draft is deterministic, so a drafted token is
accepted if and only if it equals the token that was sampled; the recording holds that token.

The last response of each group is the target, the first n its finished siblings. The target's own tokens
are indexed as it goes. One step drafts, accepts the longest drafted path that agrees, and adds the token
the model samples in any case (the bonus token).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seer.drafting.index import Draft, DraftIndex, DraftOptions
from seer.drafting.recording import RecordedGroup, Tokens
from seer.errors import InputError

_TARGET = 2**63
"""Request id of the replayed response: above those of its siblings, which count from 0."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one setting accepted."""

    references: int
    paths: int
    budget: int
    steps: int
    tokens: int
    drafted: int

    @property
    def mean_accepted(self) -> float:
        """Tokens per step, the bonus token included."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def drafted_per_step(self) -> float:
        """Tokens sent to verification per step, the bonus token not included."""
        return self.drafted / self.steps if self.steps else 0.0


def accepted_path(draft: Draft, truth: Tokens) -> list[int]:
    """Return the indices of the drafted nodes that agree with what was sampled, from the root down."""
    path: list[int] = []
    reached = -1
    for node, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        if parent == reached and len(path) < len(truth) and token == truth[len(path)]:
            path.append(node)
            reached = node
    return path


def replay(
    groups: Sequence[RecordedGroup],
    *,
    references: int,
    budget: int,
    options: DraftOptions,
    use_prompt: bool = True,
    observe: "DraftObserver | None" = None,
    index: DraftIndex | None = None,
    learn: bool = True,
) -> ReplayResult:
    """Replay every group's last response with `references` finished siblings in the index.

    An index given keeps what it has learned about hits and confidence; the groups are dropped at the end.
    Without `learn` confidences stay uncorrected.
    """
    smallest = min((len(group.responses) for group in groups), default=0)
    if references >= smallest:
        raise InputError(
            f"{references} references need groups of {references + 1} responses, the smallest has {smallest}",
            hint=f"use at most {max(smallest - 1, 0)}",
        )
    index = DraftIndex() if index is None else index
    for number, group in enumerate(groups):
        if use_prompt and len(group.prompt):
            index.set_prompt(number, group.prompt)
        for sibling, response in enumerate(group.responses[:references]):
            index.append_one(number, sibling, response)
    steps = tokens = drafted = 0
    for number, group in enumerate(groups):
        target = group.responses[-1]
        index.append_one(number, _TARGET, [])
        done = 0
        while done < len(target):
            draft = index.speculate_one(number, _TARGET, budget, options=options, learn=learn)
            path = accepted_path(draft, target[done:])
            gained = min(len(path) + 1, len(target) - done)
            if observe is not None:
                observe.observe(draft, path)
            index.append_one(number, _TARGET, target[done : done + gained], previous_count=done)
            done += gained
            steps += 1
            drafted += len(draft.tokens)
        tokens += len(target)
    index.drop(np.arange(len(groups)))
    return ReplayResult(references, options.paths, budget, steps, tokens, drafted)


class DraftObserver:
    """Collects predicted confidence against what was accepted."""

    def __init__(self) -> None:
        self._confidence: list[NDArray[np.float32]] = []
        self._accepted: list[NDArray[np.bool_]] = []

    def observe(self, draft: Draft, path: Sequence[int]) -> None:
        """Record one verified draft."""
        accepted = np.zeros(len(draft.tokens), np.bool_)
        accepted[list(path)] = True
        self._confidence.append(draft.confidence.copy())
        self._accepted.append(accepted)

    def reliability(self, bins: int = 10) -> list[tuple[float, float, int]]:
        """Return (mean predicted, accepted share, nodes) for each equal-width bin that has nodes."""
        confidence = np.concatenate(self._confidence or [np.zeros(0, np.float32)])
        accepted = np.concatenate(self._accepted or [np.zeros(0, np.bool_)])
        which = np.minimum((confidence * bins).astype(int), bins - 1)
        rows = []
        for number in range(bins):
            inside = which == number
            if inside.any():
                rows.append((float(confidence[inside].mean()), float(accepted[inside].mean()), int(inside.sum())))
        return rows
