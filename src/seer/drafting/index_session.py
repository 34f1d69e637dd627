# SPDX-License-Identifier: Apache-2.0
"""Requests that grow and are drafted for together, step after step.

Their names are looked up once and their numbers kept in arrays: a step costs two calls of the index for a batch of any
size. `close` reports the growth to the client; until then only the session's caller may use these streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seer.drafting.ids import Name
from seer.drafting.index import LINEAR, Draft, DraftIndex, DraftOptions
from seer.drafting.streams import Stream, Streams, numbers_of


class DraftBatch(NamedTuple):
    """Drafts of a batch: row i holds counts[i] nodes; a parent is a column of the row, -1 for the root."""

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    confidence: NDArray[np.float32]
    counts: NDArray[np.int32]

    def draft(self, row: int) -> Draft:
        """Return one request's draft."""
        size = int(self.counts[row])
        return Draft(self.tokens[row, :size], self.parents[row, :size], self.confidence[row, :size])


class IndexSession:
    """The streams of some requests, in the order in which they were asked for."""

    def __init__(
        self,
        index: DraftIndex,
        streams: Streams,
        requests: Sequence[tuple[Name, Name]],
        on_growth: Callable[[Sequence[Stream]], None],
    ) -> None:
        self._index, self._streams, self._requests, self._on_growth = index, streams, requests, on_growth
        self._own = [streams.open(group, request) for group, request in requests]
        self._groups, self._numbers = numbers_of(self._own)
        self._lengths = np.fromiter((stream.length for stream in self._own), np.int64, len(self._own))

    def draft(self, limits: NDArray[np.int32], options: DraftOptions = LINEAR) -> DraftBatch:
        """Draft after each request, up to its limit."""
        shape = (len(limits), int(limits.max(initial=0)))
        batch = DraftBatch(
            np.empty(shape, np.int32),
            np.empty(shape, np.int32),
            np.empty(shape, np.float32),
            np.empty(len(limits), np.int32),
        )
        self._index.speculate(self._groups, self._numbers, limits, *batch, options=options)
        return batch

    def observe(self, tokens: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
        """Request i continued with tokens[offsets[i]:offsets[i+1]]."""
        held = self._index.append(self._groups, self._numbers, self._lengths, tokens, offsets)
        ends = self._lengths + np.diff(offsets)
        for row in np.flatnonzero(held != ends).tolist():  # another sample is held under its number
            stream = self._own[row]
            start = stream.base + int(self._lengths[row])
            self._streams.fork(stream, self._requests[row][1], start, tokens[offsets[row] : offsets[row + 1]])
            self._numbers[row], ends[row] = stream.number, stream.length
        self._lengths = ends

    def close(self) -> None:
        """Report how long the streams have become."""
        for stream, length in zip(self._own, self._lengths.tolist(), strict=True):
            stream.length = length
        self._on_growth(self._own)
