# SPDX-License-Identifier: Apache-2.0
"""Confidence of draft tokens against the share of such tokens that are accepted.

The correction learns while it drafts, as in a rollout. It learns first on every other group and is then measured, still
learning, on the rest. Nodes are put into ten bins by confidence. The errors are the mean over all nodes of
|predicted - accepted| of their bin, and the worst bin that holds at least 1% of the nodes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from seer.drafting.index import DraftIndex, DraftOptions
from seer.drafting.offline_replay import DraftObserver, replay
from seer.drafting.recording import RecordedGroup


class Reliability(NamedTuple):
    set_name: str
    mode: str
    raw_mean_error: float
    mean_error: float
    worst_bin: float
    nodes: int


def measure(name: str, groups: Sequence[RecordedGroup], references: int) -> list[Reliability]:
    rows = []
    for mode, budget, paths in (("linear-8", 8, 1), ("tree-8", 8, 4), ("tree-32", 32, 4)):
        index, seen = DraftIndex(), DraftObserver()
        options = DraftOptions(paths=paths)
        replay(groups[::2], references=references, budget=budget, options=options, index=index)
        replay(groups[1::2], references=references, budget=budget, options=options, index=index, observe=seen)
        raw = DraftObserver()
        replay(groups[1::2], references=references, budget=budget, options=options, learn=False, observe=raw)
        mean, worst, nodes = _errors(seen)
        rows.append(Reliability(name, mode, _errors(raw)[0], mean, worst, nodes))
    return rows


def _errors(seen: DraftObserver) -> tuple[float, float, int]:
    bins = seen.reliability()
    total = sum(size for _, _, size in bins)
    errors = [(abs(predicted - accepted), size) for predicted, accepted, size in bins]
    mean = sum(error * size for error, size in errors) / total
    return mean, max(error for error, size in errors if size >= 0.01 * total), total
