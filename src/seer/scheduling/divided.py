# SPDX-License-Identifier: Apache-2.0
"""Divided rollout: requests run in chunks, and each chunk may run on another instance.

Base of every scheduler with chunks: an `Ordering` chooses the request, `chunk_tokens` the size of its chunk, and
`place` the instance. If the chosen request fits nowhere, nothing is started (paper, Alg. 2): a smaller request must not
overtake the one that will probably end last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from seer.buffer import Request
from seer.fleet import Fleet
from seer.placement import Place, PlacementConfig, place
from seer.scheduling.base import Assignment, Renewal
from seer.scheduling.fixed_rank import FirstComeFirstServed
from seer.scheduling.look_ahead import Upcoming, look_ahead


class Ordering(Protocol):
    """A priority queue of waiting requests, whose priorities may change while they wait."""

    def admit(self, requests: Sequence[Request]) -> None:
        """Queue new requests."""

    def push(self, request: Request) -> None:
        """Queue a request again."""

    def peek(self) -> Request | None:
        """The first waiting request."""

    def pop(self) -> Request:
        """Remove and return the request that `peek` shows."""

    def upcoming(self) -> Iterator[Request]:
        """The waiting requests in order, as far as known; the queue must not change while it is read."""

    def granted(self, request: Request, num_tokens: int) -> None:
        """The request just removed was given a chunk of this many tokens."""

    def finished(self, request: Request) -> None:
        """A request has ended: its length is known."""

    def forget(self, family: int) -> None:
        """All requests of a family of groups have ended, and no more come."""


class Divided:
    """`divided`: chunks of a fixed size, with any ordering; first come, first served by default."""

    extends_leases = False
    """Whether the end of a chunk may be moved while it runs."""

    def __init__(
        self,
        ordering: Ordering | None = None,
        *,
        chunk_tokens: int,
        placement: PlacementConfig | None = None,
        whole_blocks: bool = False,
    ) -> None:
        """With `whole_blocks`, chunks end where a KV block has just become full, so that no KV is computed twice."""
        self._chunk_tokens = chunk_tokens
        self._placement = placement or PlacementConfig()
        has_pool = self._placement.transfer is not None
        self._ordering = ordering if ordering is not None else FirstComeFirstServed(has_pool=has_pool)
        self._whole_blocks = whole_blocks

    def admit(self, requests: Sequence[Request], fleet: Fleet) -> None:
        """Queue new requests."""
        self._ordering.admit(requests)

    def requeue(self, request: Request) -> None:
        """Queue a request for its next chunk."""
        self._ordering.push(request)

    def away(self, request: Request) -> None:
        """Nothing is kept of it while it is away."""

    def finished(self, request: Request) -> None:
        """Let the ordering use its length."""
        self._ordering.finished(request)

    def renew(self, low: Sequence[Request], fleet: Fleet) -> Renewal:
        """Does nothing: every chunk ends where it was planned to."""
        return Renewal()

    def next(self, fleet: Fleet) -> Assignment | None:
        """The first waiting request, on the best instance that can hold its chunk."""
        request = self._first_waiting()
        if request is None:
            return None
        max_tokens = self.chunk_tokens(request, fleet)
        if self._whole_blocks:
            max_tokens = self.cut(request, max_tokens, fleet.block_size)
        max_tokens = min(max_tokens, request.remaining_limit)
        where = self.place(request, max_tokens, fleet)
        if where is None:
            return None
        self._ordering.pop()
        self._ordering.granted(request, max_tokens)
        num_blocks = fleet.blocks(request.num_tokens + max_tokens)
        return Assignment(
            request,
            where.instance,
            max_tokens,
            where.load_kv,
            num_blocks,
            shared_blocks=self.shared_blocks(request, fleet),
            is_lease=self.extends_leases,
        )

    def forget(self, family: int) -> None:
        """Let the ordering forget it."""
        self._ordering.forget(family)

    def _first_waiting(self) -> Request | None:
        """The first request that was not cancelled while it waited."""
        while (request := self._ordering.peek()) is not None and request.ended:
            self._ordering.pop()
        return request

    def shared_blocks(self, request: Request, fleet: Fleet) -> int:
        """Blocks counted once for a group; the paper counts them for each request."""
        return 0

    def upcoming(self, fleet: Fleet) -> Sequence[Upcoming]:
        """Waiting requests whose KV should come from SSD to DRAM now."""
        return look_ahead(self._ordering.upcoming(), fleet, self._placement)

    def chunk_tokens(self, request: Request, fleet: Fleet) -> int:
        """Tokens that the request may generate before it returns."""
        return self._chunk_tokens

    def cut(self, request: Request, max_tokens: int, block_size: int) -> int:
        """Fewer tokens, so that the chunk ends well within its blocks."""
        return end_with_a_block(request, max_tokens, block_size)

    def place(self, request: Request, max_tokens: int, fleet: Fleet) -> Place | None:
        """The instance it runs on; None if it fits nowhere."""
        return place(request, max_tokens, fleet, self._placement)


def end_with_a_block(request: Request, max_tokens: int, block_size: int) -> int:
    """Fewer tokens, so that at the chunk's end the KV of every token except the last fills whole blocks.

    Only whole blocks are kept between chunks. The last token's KV is computed by the step that samples its successor in
    any case. So the next chunk computes no KV again.
    """
    return _shortened(max_tokens, (request.num_tokens + max_tokens - 1) % block_size)


def fill_last_block(request: Request, max_tokens: int, block_size: int) -> int:
    """Fewer tokens, so that at the lease's end the last of its reserved blocks is full.

    A lease is extended or parked before its end, so where it would end matters only for the memory that it reserves.
    """
    return _shortened(max_tokens, (request.num_tokens + max_tokens) % block_size)


def _shortened(max_tokens: int, excess: int) -> int:
    return max_tokens - excess if 2 * excess <= max_tokens else max_tokens  # a much shorter chunk would cost more
