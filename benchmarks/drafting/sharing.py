# SPDX-License-Identifier: Apache-2.0
"""One draft budget for a batch: the same number of tokens for each request, or the most confident tokens of all.

A batch of recorded responses of several kinds decodes side by side, with five finished siblings each. Every step has
the same total budget in both cases. Requests that end leave the batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seer.drafting.index import DraftIndex, DraftOptions
from seer.drafting.offline_replay import accepted_path
from seer.drafting.recording import RecordedGroup
from seer.speculation.allocation import allocate

REFERENCES = 5
DRAFTED = 16  # per request, before the budget cuts


class Shared(NamedTuple):
    per_request: int
    paths: int
    uniform: float
    by_confidence: float


def compare(groups: Sequence[RecordedGroup], budgets: Sequence[int]) -> list[Shared]:
    return [
        Shared(budget, paths, _run(groups, budget, paths, False), _run(groups, budget, paths, True))
        for paths in (1, 4)
        for budget in budgets
    ]


def _run(groups: Sequence[RecordedGroup], budget: int, paths: int, by_confidence: bool) -> float:
    """Return tokens per request and step."""
    index, options = DraftIndex(), DraftOptions(paths=paths)
    for number, group in enumerate(groups):
        for sibling, response in enumerate(group.responses[:REFERENCES]):
            index.append_one(number, sibling, response)
        index.append_one(number, 99, [])
    targets = [group.responses[-1][:400] for group in groups]
    done = [0] * len(groups)
    steps = tokens = 0
    while running := [number for number in range(len(groups)) if done[number] < len(targets[number])]:
        drafts = [index.speculate_one(number, 99, DRAFTED, options=options) for number in running]
        counts = np.array([len(draft.tokens) for draft in drafts], np.int32)
        confidence = np.zeros((len(running), DRAFTED), np.float32)
        for row, draft in enumerate(drafts):
            confidence[row, : counts[row]] = draft.confidence
        kept = np.minimum(counts, budget)
        if by_confidence:
            kept = allocate(confidence, counts, budget * len(running))
        for number, draft, keep in zip(running, drafts, kept.tolist(), strict=True):
            target = targets[number][done[number] :]
            cut = type(draft)(*(column[:keep] for column in draft))
            gained = min(len(accepted_path(cut, target)) + 1, len(target))
            index.append_one(number, 99, target[:gained], previous_count=done[number])
            done[number] += gained
            tokens += gained
            steps += 1
    return tokens / steps
