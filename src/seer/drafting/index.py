# SPDX-License-Identifier: Apache-2.0
"""The draft index: the tokens of a group's responses so far, and which tokens may follow.

A thin, typed layer over the native module. The two hot calls, `append` and `speculate`, take numpy arrays
the caller owns and work on a whole batch with the interpreter lock released; the `*_one` forms are
for tools and tests. Any method may be called from any thread.

Invariants
  1. Appending is idempotent by position: tokens already held are skipped, a gap changes nothing.
  2. A draft lists parents before children in falling confidence, so every prefix of it is a valid tree.
  3. Memory stays below the limit: least recently used groups are dropped first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seer.drafting._index import Index as _NativeIndex

NO_PARENT = -1
"""Parent index of a draft's first tokens."""

CONFLICT = -1
"""Length reported by `append` where the tokens contradict what is held: the response was generated anew."""

_UNBOUNDED = 2**32 - 1
"""The native module takes lengths of contexts as 32 unsigned bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """How to draft; the same for every request of a batch."""

    paths: int = 1
    """Children per fork: 1 is a linear draft, more is a best-first tree."""

    min_confidence: float = 0.0
    """Leave out tokens less likely than this to be accepted."""

    match_min: int = 1
    """Shortest context worth drafting from, in tokens (the paper's pattern_lookup_min)."""

    match_max: int = _UNBOUNDED
    """Longest context considered, in tokens (the paper's pattern_lookup_max)."""


LINEAR = DraftOptions()
"""One path, no threshold."""


class Draft(NamedTuple):
    """Proposed tokens as a tree: `parents[i]` is an earlier index, or NO_PARENT."""

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    confidence: NDArray[np.float32]


class IndexStats(NamedTuple):
    """What the index holds."""

    groups: int
    requests: int
    tokens: int
    branches: int
    bytes: int
    evicted_groups: int


class DraftIndex:
    """Suffix index over the responses of many groups."""

    def __init__(self, memory_limit_bytes: int = 4 << 30) -> None:
        self._native = _NativeIndex(memory_limit_bytes)

    # ---- batches

    def append(  # noqa: PLR0917 - arrays of one batch, in the order of the native call
        self,
        groups: NDArray[np.uint64],
        requests: NDArray[np.uint64],
        previous_counts: NDArray[np.int64],
        tokens: NDArray[np.int32],
        offsets: NDArray[np.int64],
        out_lengths: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Append tokens[offsets[i]:offsets[i+1]] to response i and return how many tokens each now holds.

        `previous_counts[i]` tokens of the response came before these. A returned length below
        previous_counts + new tokens marks a gap: send again from there. CONFLICT marks differing tokens.
        """
        lengths = np.empty(len(groups), np.int64) if out_lengths is None else out_lengths
        self._native.append(groups, requests, previous_counts, tokens, offsets, lengths)
        return lengths

    def speculate(  # noqa: PLR0917 - arrays of one batch, in the order of the native call
        self,
        groups: NDArray[np.uint64],
        requests: NDArray[np.uint64],
        budgets: NDArray[np.int32],
        out_tokens: NDArray[np.int32],
        out_parents: NDArray[np.int32],
        out_confidence: NDArray[np.float32],
        out_counts: NDArray[np.int32],
        *,
        options: DraftOptions = LINEAR,
        learn: bool = True,
    ) -> None:
        """Draft up to budgets[i] tokens after response i into row i of the output tables.

        With `learn`, the index scores each draft itself when the response grows; pass False where the
        tokens that follow are not appended, and report with `feedback` instead.
        """
        self._native.speculate(
            groups,
            requests,
            budgets,
            out_tokens,
            out_parents,
            out_confidence,
            out_counts,
            options.paths,
            options.min_confidence,
            options.match_min,
            options.match_max,
            learn,
        )

    def speculate_contexts(  # noqa: PLR0917 - arrays of one batch, in the order of the native call
        self,
        groups: NDArray[np.uint64],
        contexts: NDArray[np.int32],
        offsets: NDArray[np.int64],
        budgets: NDArray[np.int32],
        out_tokens: NDArray[np.int32],
        out_parents: NDArray[np.int32],
        out_confidence: NDArray[np.float32],
        out_counts: NDArray[np.int32],
        *,
        options: DraftOptions = LINEAR,
    ) -> None:
        """Draft after contexts[offsets[i]:offsets[i+1]] in groups[i]; they need not be in the index."""
        self._native.speculate_context(
            groups,
            contexts,
            offsets,
            budgets,
            out_tokens,
            out_parents,
            out_confidence,
            out_counts,
            options.paths,
            options.min_confidence,
            options.match_min,
            options.match_max,
        )

    def feedback(self, confidence: NDArray[np.float32], accepted: NDArray[np.bool_]) -> None:
        """Report what became of nodes drafted without `learn`: the confidence given, and the outcome."""
        self._native.feedback(confidence, accepted)

    def drop(self, groups: ArrayLike) -> int:
        """Forget groups, give their memory back, and return how many were held."""
        return self._native.drop(np.asarray(groups, np.uint64))

    def stats(self) -> IndexStats:
        """Return what the index holds."""
        return IndexStats(**self._native.stats())

    def set_prompt(self, group: int, tokens: ArrayLike) -> bool:
        """Make a group's prompt known before its first response; False if it was known.

        The prompt is indexed once, and each response started afterwards is seen to follow its last tokens.
        """
        return self._native.set_prompt(group, np.ascontiguousarray(tokens, dtype=np.int32))

    # ---- one response

    def append_one(self, group: int, request: int, tokens: ArrayLike, *, previous_count: int | None = None) -> int:
        """Append to one response and return its length; by default after what is held already.

        Without tokens it only makes the response known, so that drafts can be made before its first token.
        """
        flat = np.ascontiguousarray(tokens, dtype=np.int32)
        start = self.length(group, request) if previous_count is None else previous_count
        lengths = self.append(
            _ids(group), _ids(request), np.array([start], np.int64), flat, np.array([0, len(flat)], np.int64)
        )
        return int(lengths[0])

    def speculate_one(
        self, group: int, request: int, budget: int, *, options: DraftOptions = LINEAR, learn: bool = True
    ) -> Draft:
        """Draft up to `budget` tokens after one response."""
        rows = _Rows(1, budget)
        self.speculate(_ids(group), _ids(request), rows.budgets, *rows.out, options=options, learn=learn)
        return rows.draft()

    def speculate_context(
        self, group: int, context: ArrayLike, budget: int, *, options: DraftOptions = LINEAR
    ) -> Draft:
        """Draft up to `budget` tokens after a context that need not be in the index."""
        flat = np.ascontiguousarray(context, dtype=np.int32)
        rows = _Rows(1, budget)
        offsets = np.array([0, len(flat)], np.int64)
        self.speculate_contexts(_ids(group), flat, offsets, rows.budgets, *rows.out, options=options)
        return rows.draft()

    # ---- contents

    def length(self, group: int, request: int) -> int:
        """Return how many tokens of a response are held."""
        return self._native.length(group, request)

    def requests(self, group: int) -> list[int]:
        """Return the responses held of a group, in order."""
        return self._native.requests(group)

    def tokens(self, group: int, request: int, start: int = 0) -> NDArray[np.int32]:
        """Return a response's tokens from `start` on."""
        out = np.empty(max(self.length(group, request) - start, 0), np.int32)
        return out[: self._native.read_tokens(group, request, start, out)]

    def count(self, group: int, pattern: Sequence[int]) -> int:
        """Return how often a pattern occurs in the group's responses."""
        return self._native.count(group, np.array(pattern, np.int32))

    def followers(self, group: int, pattern: Sequence[int]) -> dict[int, int]:
        """Return the tokens seen after a pattern with their counts: all of up to 16, else the top 8."""
        return dict(self._native.followers(group, np.array(pattern, np.int32)))

    def anchor_length(self, group: int, request: int) -> int:
        """Return the length of a response's longest suffix that occurs elsewhere, its start mark included."""
        return self._native.anchor_length(group, request)

    def corrected(self, raw: float) -> float:
        """Return the accepted frequency learned for a raw confidence."""
        return self._native.correct(raw)

    def check_integrity(self, group: int) -> str:
        """Return the first broken invariant of a group's structure, or an empty string."""
        return self._native.check_integrity(group)


class _Rows:
    """Output arrays for a few requests."""

    def __init__(self, num_requests: int, budget: int) -> None:
        shape = (num_requests, budget)
        self.budgets = np.full(num_requests, budget, np.int32)
        self.tokens = np.empty(shape, np.int32)
        self.parents = np.empty(shape, np.int32)
        self.confidence = np.empty(shape, np.float32)
        self.counts = np.empty(num_requests, np.int32)
        self.out = (self.tokens, self.parents, self.confidence, self.counts)

    def draft(self, row: int = 0) -> Draft:
        size = int(self.counts[row])
        return Draft(self.tokens[row, :size], self.parents[row, :size], self.confidence[row, :size])


def _ids(number: int) -> NDArray[np.uint64]:
    return np.array([number], np.uint64)
