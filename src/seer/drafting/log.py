# SPDX-License-Identifier: Apache-2.0
"""Token logs of running groups: all that a draft server holds.

Pure: no sockets and no clock (`now` is passed in), so any exchange can be replayed in a test. A log is
append-only int32 tokens in a bytearray. There are no trees here: instances build their own from the tokens.

Invariants
  1. A log only grows, and token i of a stream never changes.
  2. Appending is idempotent by position: known tokens are skipped, a gap is refused with the length held.
  3. Nothing of one weights version is returned to another.
  4. Bytes held, those of empty groups too, never exceed the limit: the least recently used groups go first. If only
     the group that grows is left, its tokens are refused.
  5. A group unused for its time to live is gone at the next `expire`.
  6. The weights version moves on by what a client generates or asks for, never by a drop, and never by more than
     MAX_VERSION_STEP while groups are held: one message with a wrong number cannot make all that follow stale.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from seer.drafting.wire import CONFLICT, FULL, STALE, Known, Tail, Wanted

STREAM_BYTES = 160
"""What an empty log costs: dictionary slot, number and bytearray object."""

GROUP_BYTES = 400
"""What an empty group costs: dictionary slot, number, object and its two dictionaries (343 bytes measured)."""

MAX_VERSION_STEP = 1000
"""Weights move on by one. A server that missed some updates, because it was down, has no groups."""

_TOKEN_BYTES = 4
"""Tokens are int32, as on the wire."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLimits:
    """Bounds of a store."""

    memory_bytes: int = 8 << 30
    """Bytes of logs held before groups are evicted."""

    default_ttl_s: float = 3600.0
    """Time to live of a group that was never registered."""


@dataclass(slots=True)
class _LoggedGroup:
    ttl_s: float
    last_used: float
    version: int
    logs: dict[int, bytearray] = field(default_factory=dict)

    def bytes(self) -> int:
        return GROUP_BYTES + sum(STREAM_BYTES + len(log) for log in self.logs.values())


class StoreStats(NamedTuple):
    """What a store holds."""

    groups: int
    streams: int
    tokens: int
    bytes: int


class LogStore:
    """Logs of all groups of the current weights version."""

    def __init__(self, limits: LogLimits | None = None) -> None:
        self._limits = limits or LogLimits()
        self._weights_version = 0
        self._groups: dict[int, _LoggedGroup] = {}  # in order of use, oldest first
        self._bytes = 0
        self._changes = 0  # versions are drawn from here, so that no two states of a group ever share one

    def register(self, weights_version: int, groups: Iterable[int], ttl_s: float, now: float) -> None:
        """Keep groups for `ttl_s` seconds after their last use."""
        if not self._enter(weights_version):
            return
        for number in groups:
            self._use(number, now).ttl_s = ttl_s

    def append(self, weights_version: int, tail: Tail, now: float) -> int:
        """Append to a stream; return the length it now has, or CONFLICT, FULL or STALE."""
        if not self._enter(weights_version):
            return STALE
        group = self._use(tail.group, now)
        log = group.logs.get(tail.request)
        held = 0 if log is None else len(log) // _TOKEN_BYTES
        if tail.start > held:
            return held
        known = min((held - tail.start) * _TOKEN_BYTES, len(tail.tokens))
        at = tail.start * _TOKEN_BYTES
        if log is not None and log[at : at + known] != tail.tokens[:known]:
            return CONFLICT
        fresh = tail.tokens[known:]
        needed = len(fresh) + (STREAM_BYTES if log is None else 0)
        if needed == 0:
            return held
        if not self._make_room(needed, keep=tail.group):
            return FULL
        if log is None:
            log = group.logs[tail.request] = bytearray()
        log += fresh
        group.version = self._next_version()
        self._bytes += needed
        return len(log) // _TOKEN_BYTES

    def fetch(
        self, weights_version: int, known: Iterable[Known], max_bytes: int, now: float
    ) -> tuple[list[int], list[Tail], list[Wanted], bool]:
        """Return each group's version, the tails the client lacks, what the server lacks, and whether more is to come.

        Once `max_bytes` of tokens are collected the rest is left for the next call: such a group keeps the
        version the client came with.
        """
        versions: list[int] = []
        tails: list[Tail] = []
        wanted: list[Wanted] = []
        more = False
        current = self._enter(weights_version)
        for state in known:
            if not current:
                versions.append(state.version)
                continue
            group = self._use(state.group, now)
            if state.version == group.version:
                versions.append(state.version)
                continue
            complete, size = _missing(state, group, max_bytes, tails)
            max_bytes -= size
            wanted.extend(_lacking(state, group))
            versions.append(group.version if complete else state.version)
            more = more or not complete
        return versions, tails, wanted, more

    def drop(self, weights_version: int, groups: Iterable[int]) -> None:
        """Forget finished groups."""
        if weights_version != self._weights_version:
            return
        for number in groups:
            if number in self._groups:
                self._forget(number)

    def expire(self, now: float) -> int:
        """Drop groups unused for their time to live and return how many."""
        over = [number for number, group in self._groups.items() if now - group.last_used > group.ttl_s]
        for number in over:
            self._forget(number)
        return len(over)

    def stats(self) -> StoreStats:
        """Return what is held."""
        logs = [log for group in self._groups.values() for log in group.logs.values()]
        tokens = sum(len(log) for log in logs) // _TOKEN_BYTES
        return StoreStats(len(self._groups), len(logs), tokens, self._bytes)

    # ---- inside

    def _enter(self, weights_version: int) -> bool:
        """Follow the newest weights version seen; False for one that is over, or too far ahead."""
        if self._groups and weights_version > self._weights_version + MAX_VERSION_STEP:
            return False
        if weights_version > self._weights_version:
            for number in list(self._groups):
                self._forget(number)
            self._weights_version = weights_version
        return weights_version == self._weights_version

    def _next_version(self) -> int:
        self._changes += 1
        return self._changes

    def _use(self, number: int, now: float) -> _LoggedGroup:
        group = self._groups.pop(number, None)
        if group is None:
            group = _LoggedGroup(self._limits.default_ttl_s, now, self._next_version())
            self._make_room(group.bytes(), keep=number)
            self._bytes += group.bytes()
        group.last_used = now
        self._groups[number] = group  # last: the most recently used
        return group

    def _forget(self, number: int) -> None:
        self._bytes -= self._groups.pop(number).bytes()

    def _make_room(self, needed: int, keep: int) -> bool:
        limit = self._limits.memory_bytes
        while self._bytes + needed > limit:
            oldest = next(iter(self._groups), keep)
            if oldest == keep:  # the group in use is the last one: it is alone
                return False
            self._forget(oldest)
        return True


def _missing(state: Known, group: _LoggedGroup, room: int, tails: list[Tail]) -> tuple[bool, int]:
    """Add the tails a client lacks, up to `room` bytes; return whether that was all, and the bytes."""
    lengths = _lengths(state)
    size = 0
    for request, log in group.logs.items():
        start = lengths.get(request, 0)
        lacking = len(log) - start * _TOKEN_BYTES
        if lacking <= 0:
            continue
        part = min(lacking, (room - size) // _TOKEN_BYTES * _TOKEN_BYTES)
        if part > 0:
            at = start * _TOKEN_BYTES
            tails.append(Tail(state.group, request, start, bytes(log[at : at + part])))
            size += part
        if part < lacking:
            return False, size
    return True, size


def _lacking(state: Known, group: _LoggedGroup) -> Iterable[Wanted]:
    for request, length in _lengths(state).items():
        held = len(group.logs.get(request, b"")) // _TOKEN_BYTES
        if held < length:
            yield Wanted(state.group, request, held)


def _lengths(state: Known) -> Mapping[int, int]:
    requests = np.frombuffer(state.requests, "<u8").tolist()
    return dict(zip(requests, np.frombuffer(state.lengths, "<u4").tolist(), strict=True))
