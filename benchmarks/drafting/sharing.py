# SPDX-License-Identifier: Apache-2.0
"""One size of drafts for all requests of a batch, or the most confident tokens of the whole batch.

Recorded responses decode side by side, with ten finished siblings each; where one ends, another enters. A step costs
base + row x batched tokens + host if it has drafts, by default as Qwen2.5-1.5B on an H200. Sizes for all are the
budget's, from measured acceptance. By confidence, the tokens to verify are those that give the most tokens per second
if confidences are right. Where rows are padded, every request of a step has as many rows as the one with the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seer.drafting.index import Draft, DraftIndex, DraftOptions
from seer.drafting.offline_replay import accepted_path
from seer.drafting.recording import RecordedGroup, Tokens
from seer.speculation.acceptance import AcceptanceTracker
from seer.speculation.budget import allot
from seer.speculation.throughput import Acceptance, BatchClass, DraftLimits

NUM_REFERENCES, NUM_TARGETS, NUM_TOKENS, MAX_TOKENS = 10, 4, 200, 15
OPTIONS = DraftOptions(paths=4)
LIMITS = {False: DraftLimits(tuple(range(MAX_TOKENS + 1)), 4), True: DraftLimits((0, 1, 2, 4, 8, 11, 15), 4, True)}
TRIAL_STEPS, TRIAL_TOKENS = 16, 2


@dataclass(frozen=True)
class Cost:
    base_s: float = 1800e-6
    row_s: float = 6e-6
    host_s: float = 100e-6

    def step_s(self, num_requests: int, tokens_per_request: float) -> float:
        return self.base_s + self.row_s * num_requests * tokens_per_request

    def draft_s(self, num_requests: int, depth: float) -> float:
        return self.host_s if depth else 0.0


class Shared(NamedTuple):
    batch: int
    is_padded: bool
    same: float
    by_confidence: float


class Target(NamedTuple):
    group: int
    request: int
    tokens: Tokens


def compare(groups: Sequence[RecordedGroup], batches: Sequence[int], cost: Cost | None = None) -> list[Shared]:
    """Tokens per second over those without drafts."""
    cost = cost or Cost()
    return [
        Shared(batch, padded, *(_run(groups, batch, cost, padded, by_confidence) for by_confidence in (False, True)))
        for batch in batches
        for padded in (False, True)
    ]


def _run(groups: Sequence[RecordedGroup], batch: int, cost: Cost, padded: bool, by_confidence: bool) -> float:
    index, tracker = DraftIndex(), AcceptanceTracker(prior_acceptance=0.25, prior_weight=4.0)
    queue, done = _queue(index, groups)
    num_steps = num_tokens = 0
    took_s = 0.0
    running: list[Target] = []
    while len(running) + len(queue) >= batch:
        running += [queue.pop() for _ in range(batch - len(running))]
        if by_confidence:
            drafts = [index.speculate_one(one.group, one.request, MAX_TOKENS, options=OPTIONS) for one in running]
            kept = _most_confident(drafts, cost)
        else:
            classes = [BatchClass(batch, Acceptance({4: tracker.survival()}))]
            size = allot("seer", cost, classes, LIMITS[padded])[0].tokens
            size = size or (0 if num_steps % TRIAL_STEPS else TRIAL_TOKENS)
            drafts = [index.speculate_one(one.group, one.request, size, options=OPTIONS) for one in running]
            kept = [size] * batch
        counts = []
        for one, draft, most in zip(running, drafts, kept, strict=True):
            cut, at = Draft(*(column[:most] for column in draft)), done[one.group, one.request]
            path = accepted_path(cut, one.tokens[at:])
            tracker.observe(most, path)
            gained = min(len(path) + 1, len(one.tokens) - at)
            index.append_one(one.group, one.request, one.tokens[at : at + gained], previous_count=at)
            done[one.group, one.request] += gained
            num_tokens += gained
            counts.append(len(cut.tokens))
        num_rows = batch * (1 + max(counts)) if padded else batch + sum(counts)
        took_s += cost.step_s(1, num_rows) + cost.draft_s(batch, max(counts))
        num_steps += 1
        running = [one for one in running if done[one.group, one.request] < len(one.tokens)]
    return num_tokens / took_s / (batch / cost.step_s(batch, 1))


def _queue(index: DraftIndex, groups: Sequence[RecordedGroup]) -> tuple[list[Target], dict[tuple[int, int], int]]:
    """Responses to continue from their middle, in random order, and how much of each is known."""
    queue, done = [], {}
    for number, group in enumerate(groups):
        for sibling, response in enumerate(group.responses[:NUM_REFERENCES]):
            index.append_one(number, sibling, response)
        for request in range(NUM_REFERENCES, NUM_REFERENCES + NUM_TARGETS):
            response = group.responses[request]
            start = min(len(response) // 2, 1000)
            index.append_one(number, request, response[:start])
            queue.append(Target(number, request, response[: start + NUM_TOKENS]))
            done[number, request] = start
    return [queue[place] for place in np.random.default_rng(0).permutation(len(queue))], done


def _most_confident(drafts: Sequence[Draft], cost: Cost) -> list[int]:
    """How many tokens of each draft to verify: any prefix is a draft, and confidences fall."""
    batch = len(drafts)
    flat = np.concatenate([draft.confidence for draft in drafts]).astype(np.float64)
    owner = np.repeat(np.arange(batch), [len(draft.tokens) for draft in drafts])
    order = np.argsort(-flat, kind="stable")
    gained: NDArray[np.float64] = batch + np.concatenate([[0.0], np.cumsum(flat[order])])
    step_s = np.array([cost.step_s(1, batch + v) + cost.draft_s(batch, v) for v in range(len(gained))])
    best = int(np.argmax(gained / step_s))
    return np.bincount(owner[order[:best]], minlength=batch).tolist()
