# SPDX-License-Identifier: Apache-2.0
"""Our rule: the sizes with the most tokens per second by the throughput model.

Candidates
    uniform    every choice of tokens, the same for all requests, each class on its best number of paths
    greedy     from no drafts on, one more choice at a time to the class whose next tokens gain most per token
    the paper  its rule's answer

For a given total of draft tokens the greedy answer gains most, because a class's tokens gain less and less. Where all
classes accept alike, uniform and greedy are nearly the same. Probes have no weight of their own.

Invariants
  1. No uniform depth, on any number of paths, and neither the paper's rule nor fixed limits gain more by the model.
  2. Of equal candidates the one with the fewest draft tokens is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import pairwise
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from seer.speculation.paper import paper
from seer.speculation.throughput import (
    Acceptance,
    BatchClass,
    DraftLimits,
    DraftSize,
    StepCost,
    step_with_drafts_s,
)

T = TypeVar("T")
Rule = Callable[[Acceptance, DraftLimits], T]


def _kept_with_acceptance(compute: Rule[T]) -> Rule[T]:
    """Keep what `compute` returns as long as there is the acceptance: engines measure another one every few steps."""
    kept: WeakKeyDictionary[Acceptance, dict[DraftLimits, T]] = WeakKeyDictionary()

    @wraps(compute)
    def known(acceptance: Acceptance, limits: DraftLimits) -> T:
        by_limits = kept.get(acceptance)
        if by_limits is None:
            by_limits = kept[acceptance] = {}
        if limits not in by_limits:
            by_limits[limits] = compute(acceptance, limits)
        return by_limits[limits]

    return known


class Option(NamedTuple):
    """A size of drafts for one class, and τ with it."""

    size: DraftSize
    gain: float


def seer(cost: StepCost, classes: Sequence[BatchClass], limits: DraftLimits) -> list[DraftSize]:
    """The candidate with the most tokens per second."""
    counts = [one.num_requests for one in classes]
    num_requests = sum(counts)

    def key(candidate: Sequence[Option]) -> tuple[float, int]:
        gained, drafted = 0.0, 0
        for count, option in zip(counts, candidate, strict=True):
            gained += count * option.gain
            drafted += count * option.size.tokens
        return gained / step_with_drafts_s(cost, num_requests, drafted), -drafted

    return [option.size for option in max(_candidates(cost, classes, limits), key=key)]


def _candidates(cost: StepCost, classes: Sequence[BatchClass], limits: DraftLimits) -> Iterable[Sequence[Option]]:
    yield from zip(*(_options(one.acceptance, limits) for one in classes), strict=True)
    if not limits.is_uniform and sum(one.num_requests > 0 for one in classes) > 1:
        yield from _greedy(classes, limits)
        sizes = zip(classes, paper(cost, classes, limits), strict=True)
        yield [Option(size, one.acceptance.gain(size)) for one, size in sizes]


def _greedy(classes: Sequence[BatchClass], limits: DraftLimits) -> Iterable[Sequence[Option]]:
    steps = [(-slope, index, option) for index, one in enumerate(classes) for slope, option in _steps(one, limits)]
    steps.sort(key=lambda step: step[:2])
    chosen = [_options(one.acceptance, limits)[0] for one in classes]
    for _, index, option in steps:
        chosen[index] = option
        yield tuple(chosen)


def _steps(one: BatchClass, limits: DraftLimits) -> Sequence[tuple[float, Option]]:
    return _concave(one.acceptance, limits) if one.num_requests else ()


@_kept_with_acceptance
def _options(acceptance: Acceptance, limits: DraftLimits) -> list[Option]:
    """For each choice of tokens, the number of paths that gains most: the fewest of equals."""
    known = [paths for paths in sorted(acceptance.by_paths) if paths <= limits.max_paths]

    def best(tokens: int) -> Option:
        sizes = [DraftSize(tokens, paths) for paths in known]
        return max((Option(size, acceptance.gain(size)) for size in sizes), key=lambda option: option.gain)

    return [best(tokens) for tokens in limits.choices]


@_kept_with_acceptance
def _concave(acceptance: Acceptance, limits: DraftLimits) -> list[tuple[float, Option]]:
    """The options on the concave hull of gain over tokens, each with the gain per token since the one before."""
    hull: list[Option] = []
    for option in _options(acceptance, limits):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return [(_slope(before, option), option) for before, option in pairwise(hull)]


def _slope(before: Option, after: Option) -> float:
    return (after.gain - before.gain) / (after.size.tokens - before.size.tokens)
