# SPDX-License-Identifier: Apache-2.0
"""One instance's copy of a draft server's logs: what to ship, what to ask for, what came back.

Pure: no sockets, no clock, no threads. The client moves the messages; a test may lose, double and reorder
them. The tokens themselves are in the draft index, so nothing is stored twice.

A stream is *outgoing* here when this instance generates it, or when the server asked for it. For those the
replica counts what was sent; for all others the index's length is what we hold.

Invariants
  1. Messages may be lost, doubled or reordered. Once they get through again, every stream becomes equal on both
     sides: a gap is answered with the length held, and Fetched.wanted names what the server lacks.
  2. At most one Push and one Fetch are on their way, so a slow server is never flooded.
  3. An answer counts only if it carries the number of the question that waits for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from seer.drafting.index import DraftIndex
from seer.drafting.wire import (
    CONFLICT,
    FULL,
    STALE,
    Drop,
    Fetch,
    Fetched,
    Known,
    Push,
    Pushed,
    Register,
    Reply,
    Tail,
    pack_tokens,
    unpack_tokens,
)

SHIP_TOKENS = 64
"""Ship once a stream has this many new tokens. Lockstep siblings accept 4% less at 64, 9% less at 256."""

_PUSH_BYTES = 1 << 20
"""Tokens per message: the server appends them in one go, and other clients wait for that."""


@dataclass(slots=True)
class _Outgoing:
    """A stream this instance ships."""

    length: int = 0
    """Tokens of the stream in the index."""

    sent: int = 0
    """Tokens sent, answered or not."""

    since: float = 0.0
    """When the oldest unsent token was noted."""

    own: bool = False
    """Generated here; otherwise shipped once, because the server asked."""

    dead: bool = False
    """The server will not take it: no room, or it holds other tokens under this number."""


@dataclass(slots=True)
class _ReplicatedGroup:
    ttl_s: float
    expires_at: float
    version: int = 0
    outgoing: dict[int, _Outgoing] = field(default_factory=dict)


class Replica:
    """Synchronises the groups of one server with the index."""

    def __init__(self, index: DraftIndex, weights_version: int) -> None:
        self._index = index
        self._weights_version = weights_version
        self._groups: dict[int, _ReplicatedGroup] = {}
        self._dirty: dict[tuple[int, int], _Outgoing] = {}
        self._server: int | None = None
        self._sequence = 0
        self._push: tuple[int, list[Tail]] | None = None
        self._fetch: tuple[int, list[int]] | None = None
        self._unregistered: set[int] = set()
        self._finished: set[int] = set()
        self.refused_streams = 0
        self.fetched_rounds = 0

    @property
    def pushing(self) -> bool:
        """A Push waits for its answer."""
        return self._push is not None

    @property
    def fetching(self) -> bool:
        """A Fetch waits for its answer."""
        return self._fetch is not None

    @property
    def settled(self) -> bool:
        """Everything noted has been shipped and answered."""
        return not self._dirty and not self.pushing

    # ---- what happened here

    def register(self, group: int, ttl_s: float, now: float) -> None:
        """Synchronise a group until it has been unused for `ttl_s` seconds."""
        known = self._groups.get(group)
        if known is None:
            self._groups[group] = _ReplicatedGroup(ttl_s, now + ttl_s)
        else:
            known.ttl_s = ttl_s
            known.expires_at = now + ttl_s
        self._unregistered.add(group)

    def note(self, group: int, stream: int, length: int, default_ttl_s: float, now: float) -> None:
        """Take note that the index now holds `length` tokens of a stream generated here."""
        known = self._groups.get(group)
        if known is None:
            self.register(group, default_ttl_s, now)
            known = self._groups[group]
        known.expires_at = now + known.ttl_s
        outgoing = known.outgoing.setdefault(stream, _Outgoing())
        outgoing.own = True
        outgoing.length = length
        self._mark(group, stream, outgoing, now)

    def drop(self, group: int) -> None:
        """Stop synchronising a finished group, and have the server drop it."""
        self._forget(group)
        self._finished.add(group)

    def expire(self, now: float) -> list[int]:
        """Stop synchronising groups that were unused for their time to live, and return them."""
        over = [number for number, group in self._groups.items() if now > group.expires_at]
        for number in over:
            self._forget(number)
        return over

    # ---- what to send

    def due_at(self, ship_after_s: float) -> float | None:
        """Return when the next Push should leave, 0.0 for at once, None if nothing waits."""
        if not self._dirty:
            return None
        if any(out.length - out.sent >= SHIP_TOKENS for out in self._dirty.values()):
            return 0.0
        return min(out.since for out in self._dirty.values()) + ship_after_s

    def next_push(self) -> Push | None:
        """Return everything unsent, in one message of bounded size."""
        assert self._push is None, "one Push at a time"
        tails: list[Tail] = []
        room = _PUSH_BYTES
        for (group, stream), outgoing in list(self._dirty.items()):
            tokens = self._index.tokens(group, stream, outgoing.sent)[: room // 4]
            del self._dirty[group, stream]
            if len(tokens) == 0:  # evicted from the index: nothing is left to ship
                continue
            tails.append(Tail(group, stream, outgoing.sent, pack_tokens(tokens)))
            outgoing.sent += len(tokens)
            room -= 4 * len(tokens)
            if outgoing.sent < outgoing.length:
                self._dirty[group, stream] = outgoing
            elif not outgoing.own:  # if this gets lost, the server will ask again
                del self._groups[group].outgoing[stream]
            if room < 4:
                break
        if not tails:
            return None
        self._push = (self._next_sequence(), tails)
        return Push(self._push[0], self._weights_version, tails)

    def next_fetch(self, *, even_if_idle: bool = False) -> Fetch | None:
        """Return a Fetch for what the index lacks of every group."""
        assert self._fetch is None, "one Fetch at a time"
        if not self._groups and not even_if_idle:
            return None
        known = [self._known(number, group) for number, group in self._groups.items()]
        self._fetch = (self._next_sequence(), [state.group for state in known])
        return Fetch(self._fetch[0], self._weights_version, known)

    def next_notices(self) -> Iterator[Register | Drop]:
        """Return registrations and drops that were not sent yet; they need no answer."""
        by_ttl: dict[float, list[int]] = {}
        for number in self._unregistered:
            if number in self._groups:
                by_ttl.setdefault(self._groups[number].ttl_s, []).append(number)
        self._unregistered.clear()
        for ttl_s, numbers in by_ttl.items():
            yield Register(self._next_sequence(), self._weights_version, numbers, ttl_s)
        if self._finished:
            yield Drop(self._next_sequence(), self._weights_version, sorted(self._finished))
            self._finished.clear()

    # ---- what came back

    def receive(self, reply: Reply, now: float) -> bool:
        """Apply an answer, unless it is late or doubled; True if the server has more to send right away."""
        if isinstance(reply, Pushed) and self._push is not None and reply.sequence == self._push[0]:
            self._meet(reply.server)
            tails, self._push = self._push[1], None
            self._apply_pushed(tails, reply.lengths, now)
        elif isinstance(reply, Fetched) and self._fetch is not None and reply.sequence == self._fetch[0]:
            # A new server may have left out tails because of a version that we had from the old one.
            groups = [] if self._meet(reply.server) else self._fetch[1]
            self._fetch = None
            self._apply_fetched(groups, reply, now)
            return reply.more
        return False

    def lose(self) -> None:
        """Give up on unanswered messages, and on all assumptions about what the server has received."""
        self._push = None
        self._fetch = None
        # A version stands for lengths that we reported. After a lost Push they may be wrong: compare them in full.
        for group in self._groups.values():
            group.version = 0
        self._unregistered.update(self._groups)

    # ---- inside

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def _mark(self, group: int, stream: int, outgoing: _Outgoing, now: float) -> None:
        if outgoing.dead or outgoing.sent >= outgoing.length:
            return
        if (group, stream) not in self._dirty:
            outgoing.since = now
            self._dirty[group, stream] = outgoing

    def _forget(self, number: int) -> None:
        group = self._groups.pop(number, None)
        if group is not None:
            for stream in group.outgoing:
                self._dirty.pop((number, stream), None)

    def _meet(self, server: int) -> bool:
        """Note which server answered; True if it is a new one, which has nothing of what the last one was sent."""
        anew = self._server is not None and server != self._server
        if anew:
            for group in self._groups.values():
                group.version = 0
            self._unregistered.update(self._groups)
        self._server = server
        return anew

    def _known(self, number: int, group: _ReplicatedGroup) -> Known:
        streams = self._index.requests(number)
        lengths = []
        for stream in streams:
            outgoing = group.outgoing.get(stream)
            lengths.append(self._index.length(number, stream) if outgoing is None else outgoing.sent)
        return Known(number, group.version, np.array(streams, "<u8").tobytes(), np.array(lengths, "<u4").tobytes())

    def _apply_pushed(self, tails: list[Tail], lengths: list[int], now: float) -> None:
        for tail, held in zip(tails, lengths, strict=False):
            group = self._groups.get(tail.group)
            outgoing = group.outgoing.get(tail.request) if group is not None else None
            if outgoing is None:
                continue
            if held in (CONFLICT, FULL, STALE):
                self.refused_streams += 1
                outgoing.dead = True
                self._dirty.pop((tail.group, tail.request), None)
            elif held < tail.start + len(tail.tokens) // 4:
                outgoing.sent = max(held, 0)
                self._mark(tail.group, tail.request, outgoing, now)

    def _apply_fetched(self, groups: list[int], reply: Fetched, now: float) -> None:
        for tail in reply.tails:
            if tail.group not in self._groups:
                continue  # dropped while the answer travelled
            self._index.append_one(tail.group, tail.request, unpack_tokens(tail.tokens), previous_count=tail.start)
        for number, version in zip(groups, reply.versions, strict=False):
            if number in self._groups:
                self._groups[number].version = version
        for want in reply.wanted:
            group = self._groups.get(want.group)
            if group is None:
                continue
            outgoing = group.outgoing.setdefault(want.request, _Outgoing())
            outgoing.length = self._index.length(want.group, want.request)
            outgoing.sent = min(want.start, outgoing.length)
            self._mark(want.group, want.request, outgoing, now)
        self.fetched_rounds += not reply.more
