# SPDX-License-Identifier: Apache-2.0
"""Which stream of the index is a request's response?

Usually the request's own number. But a response may be generated anew, when its instance died after
shipping more than the rollout kept; the index then holds a different sample under the old number. The old
tokens stay, as one more sibling, and the request continues under a fresh number.

Rule: after an append the stream must end exactly where the request does. If it does not, fork.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seer.drafting.ids import Name, mix, number_of
from seer.drafting.index import DraftIndex
from seer.drafting.recording import Tokens


@dataclass(slots=True)
class Stream:
    """Where a request's tokens go."""

    group: int
    number: int
    base: int = 0
    """Tokens of the request that came before the stream's first."""

    length: int = 0
    """Tokens observed here, from the base on."""


class Streams:
    """The streams of the requests running here."""

    def __init__(self, index: DraftIndex, client: int) -> None:
        self._index = index
        self._client = client
        self._forks = 0
        self._by_request: dict[tuple[Name, Name], Stream] = {}

    def open(self, group: Name, request: Name) -> Stream:
        """Return the stream of a request, known to the index from now on."""
        stream = self._by_request.get((group, request))
        if stream is None:
            stream = Stream(number_of(group), number_of(request))
            self._by_request[group, request] = stream
            self._index.append_one(stream.group, stream.number, [], previous_count=0)
        return stream

    def observe(
        self,
        requests: Sequence[tuple[Name, Name]],
        tokens: Tokens,
        offsets: NDArray[np.int64],
        previous_counts: Sequence[int | None] | None = None,
    ) -> list[Stream]:
        """Append tokens[offsets[i]:offsets[i+1]] to request i.

        `previous_counts[i]` tokens of the request came before, None for as many as were observed here.
        """
        streams = [self.open(group, request) for group, request in requests]
        starts = [stream.base + stream.length for stream in streams]
        if previous_counts is not None:
            starts = [start if given is None else given for start, given in zip(starts, previous_counts, strict=True)]
        for stream, start, (_, request) in zip(streams, starts, requests, strict=True):
            if start < stream.base:
                self._renumber(stream, request, start)
        positions = np.fromiter(
            (start - stream.base for start, stream in zip(starts, streams, strict=True)),
            np.int64,
            len(streams),
        )
        held = self._index.append(*numbers_of(streams), positions, tokens, offsets)
        ends = positions + np.diff(offsets)
        for stream, end in zip(streams, ends.tolist(), strict=True):
            stream.length = end
        for row in np.flatnonzero(held != ends).tolist():
            self.fork(streams[row], requests[row][1], starts[row], tokens[offsets[row] : offsets[row + 1]])
        return streams

    def fork(self, stream: Stream, request: Name, start: int, tokens: Tokens) -> None:
        """Continue a request under a fresh number: its tokens from `start` on are these."""
        self._renumber(stream, request, start)
        stream.length = self._index.append_one(stream.group, stream.number, tokens, previous_count=0)

    def _renumber(self, stream: Stream, request: Name, start: int) -> None:
        """Continue a request under a fresh number, from its token `start` on."""
        self._forks += 1
        stream.number = mix(number_of(request), self._client, self._forks)
        stream.base = start
        stream.length = 0

    def drop(self, group: Name) -> None:
        """Forget the requests of a group."""
        for key in [key for key in self._by_request if key[0] == group]:
            del self._by_request[key]


def numbers_of(streams: Sequence[Stream]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Their groups and their own numbers, as the index takes them."""
    return (
        np.fromiter((stream.group for stream in streams), np.uint64, len(streams)),
        np.fromiter((stream.number for stream in streams), np.uint64, len(streams)),
    )
