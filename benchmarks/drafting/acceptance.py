# SPDX-License-Identifier: Apache-2.0
"""Accepted tokens per step at equal budget: arctic without its caps against ours, on recorded groups.

arctic gets one tree per group, which is its best use here (it does not know groups), no cap by match length and no
threshold. As in its own cache, the prompt stands in front of every response, after a start mark, because our index has
one. The better of its two depths counts.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from seer.drafting.index import Draft, DraftOptions
from seer.drafting.offline_replay import accepted_path, replay
from seer.drafting.recording import RecordedGroup

START = 2_000_000  # no tokenizer has this id
UNCAPPED = 1000.0  # draft length <= match length x this


class Comparison(NamedTuple):
    set_name: str
    references: int
    mode: str
    arctic: float
    ours: float
    arctic_drafted: float
    ours_drafted: float


def arctic_replay(  # noqa: PLR0917
    module: ModuleType, groups: Sequence[RecordedGroup], references: int, budget: int, tree: bool, depth: int
) -> tuple[float, float]:
    """Return accepted tokens per step and drafted tokens per step."""
    steps = tokens = drafted = 0
    for group in groups:
        suffixes = module.SuffixTree(depth)
        lead = np.concatenate([[START], group.prompt]).astype(np.int32)
        for sibling, response in enumerate(group.responses[:references]):
            suffixes.extend_ndarray(sibling, np.concatenate([lead, response]))
        target = group.responses[-1]
        suffixes.extend_ndarray(references, lead)
        whole = np.concatenate([lead, target])
        done = 0
        while done < len(target):
            end = len(lead) + done
            context = np.ascontiguousarray(whole[max(end - depth, 0) : end])
            got = suffixes.speculate_ndarray(context, budget, UNCAPPED, 0.0, 0.0, tree)
            draft = Draft(
                np.array(got.token_ids, np.int32),
                np.array(got.parents, np.int32),
                np.array(got.probs, np.float32),
            )
            gained = min(len(accepted_path(draft, target[done:])) + 1, len(target) - done)
            suffixes.extend_ndarray(references, np.ascontiguousarray(target[done : done + gained]))
            done += gained
            steps += 1
            drafted += len(draft.tokens)
        tokens += len(target)
    return tokens / steps, drafted / steps


MODES = {"linear-8": (8, 1), "tree-8": (8, 8), "tree-32": (32, 8)}
"""Name: budget, children per fork (arctic's trees have no limit per fork)."""


def compare(
    module: ModuleType,
    name: str,
    groups: Sequence[RecordedGroup],
    references: Sequence[int],
    modes: Sequence[str],
) -> list[Comparison]:
    rows = []
    for n in references:
        for mode in modes:
            budget, paths = MODES[mode]
            theirs = max(arctic_replay(module, groups, n, budget, paths > 1, depth) for depth in (24, 64))
            ours = replay(groups, references=n, budget=budget, options=DraftOptions(paths=paths))
            rows.append(Comparison(name, n, mode, theirs[0], ours.mean_accepted, theirs[1], ours.drafted_per_step))
    return rows


class Efficiency(NamedTuple):
    set_name: str
    references: int
    accepted: float
    arctic_drafted: float
    ours_drafted: float


def tokens_for_equal_acceptance(
    module: ModuleType, name: str, groups: Sequence[RecordedGroup], references: int
) -> Efficiency:
    """The fewest drafted tokens, cut by confidence, that reach what arctic accepts without caps (linear, 8)."""
    theirs, drafted = max(arctic_replay(module, groups, references, 8, False, depth) for depth in (24, 64))
    best = float("inf")
    for least in np.arange(0.0, 0.5, 0.02):
        options = DraftOptions(min_confidence=float(least))
        ours = replay(groups, references=references, budget=8, options=options)
        if ours.mean_accepted < theirs:
            break
        best = min(best, ours.drafted_per_step)
    return Efficiency(name, references, theirs, drafted, best)
