# SPDX-License-Identifier: Apache-2.0
"""The draft client: an instance's own index, synchronised with the draft servers in the background.

The engine's thread calls `observe` and `draft`; both use the local index only and never wait for a server. One
background thread ships new tokens (after 64 of them or 100 ms; later while nothing is drafted here, pace.py), fetches
siblings' tokens from other instances, and handles servers that are slow, gone or restarted. Without a server the client
drafts from what it observed itself.

Invariants
  1. `observe`, `draft`, `register` and `drop` do no I/O; they pass work to the background thread through one queue.
  2. Every wait of the background thread ends when its next task is due.
  3. An outage is logged once when it begins and once when it ends, per server.
  4. Nothing waits in the queue for a background thread that has failed.

Threads: the background thread owns the replicas and sockets. Streams are under one lock, which is held for work on the
local index only.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seer.drafting.curve_keys import ClientKeys
from seer.drafting.ids import MAX_KEPT, Name, mix, number_of
from seer.drafting.index import LINEAR, DraftIndex, DraftOptions
from seer.drafting.index_session import DraftBatch, IndexSession
from seer.drafting.link import Link
from seer.drafting.pace import Pace
from seer.drafting.streams import Stream, Streams

logger = logging.getLogger(__name__)

RequestKey = tuple[Name, Name]
"""A group and a request of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientConfig:
    """Settings of a draft client."""

    servers: tuple[str, ...] = ()
    """Addresses of the draft servers, in the same order on every instance: groups are spread by hash."""

    keys: ClientKeys | None = None
    """Keys that the servers know; None for servers that are open to everyone."""

    weights_version: int = 0
    """Version of the weights; drafts never mix weights versions."""

    ship_after_s: float = 0.05
    """Ship tokens that have waited this long, even if fewer than 64; with a busy thread's delay, within 100 ms. Later
    while this instance drafts nothing (pace.py)."""

    fetch_every_s: float = 0.025
    """Ask for siblings' tokens this often, or as often as the engine calls if that is less often; less often while it
    drafts nothing (pace.py)."""

    answer_within_s: float = 2.0
    """A server that has not answered for this long counts as gone."""

    default_ttl_s: float = 3600.0
    """Time to live of a group that was observed but never registered."""

    memory_limit_bytes: int = 4 << 30
    """Limit of the local index."""


class DraftClient:
    """Observes and drafts for one instance."""

    def __init__(self, config: ClientConfig | None = None) -> None:
        self._config = config or ClientConfig()
        self.index = DraftIndex(self._config.memory_limit_bytes)
        self._streams = Streams(self.index, secrets.randbits(63))
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[list[Link]], None]] = deque()
        self._closing = threading.Event()
        self._failed = threading.Event()
        self._pace = Pace()
        self._thread: threading.Thread | None = None
        if self._config.servers:
            self._thread = threading.Thread(target=self._work, name="seer-draft-client", daemon=True)
            self._thread.start()

    # ---- the engine's calls

    def register(self, group: Name, ttl_s: float, *, prompt: ArrayLike | None = None) -> None:
        """Follow a group until unused here for `ttl_s` seconds; its prompt helps the first drafts."""
        number = number_of(group)
        if prompt is not None:
            self.index.set_prompt(number, prompt)
        self._post(number, lambda link: link.replica.register(number, ttl_s, time.monotonic()))

    def observe(self, group: Name, request: Name, tokens: ArrayLike, *, previous_count: int | None = None) -> None:
        """Take in tokens a request has generated.

        `previous_count` says how many tokens of its response came before; None continues what was observed
        here. When a request arrives from elsewhere, give its response so far with previous_count=0: what is
        known already costs nothing.
        """
        flat = np.ascontiguousarray(tokens, dtype=np.int32)
        offsets = np.array([0, len(flat)], np.int64)
        self.observe_batch([(group, request)], flat, offsets, previous_counts=[previous_count])

    def observe_batch(
        self,
        requests: Sequence[RequestKey],
        tokens: NDArray[np.int32],
        offsets: NDArray[np.int64],
        *,
        previous_counts: Sequence[int | None] | None = None,
    ) -> None:
        """Take in one step of a batch: request i has generated tokens[offsets[i]:offsets[i+1]]."""
        with self._lock:
            streams = self._streams.observe(requests, tokens, offsets, previous_counts)
        self._note_growth(streams)

    def draft(
        self,
        requests: Sequence[RequestKey],
        budgets: Sequence[int] | NDArray[np.int32],
        *,
        options: DraftOptions = LINEAR,
    ) -> DraftBatch:
        """Draft after each request, up to its budget."""
        return self.open_session(requests).draft(np.ascontiguousarray(budgets, dtype=np.int32), options)

    def open_session(self, requests: Sequence[RequestKey]) -> IndexSession:
        """Look requests up once, to observe and draft for them several times."""
        self._pace.drafted(time.monotonic())
        with self._lock:
            return IndexSession(self.index, self._streams, requests, self._note_growth)

    def drop(self, group: Name) -> None:
        """Forget a finished group, here and on its server."""
        number = number_of(group)
        with self._lock:
            self._streams.drop(group)
        self.index.drop([number])
        self._post(number, lambda link: self._drop(link, number))

    # ---- the owner's calls

    def flush(self, timeout_s: float) -> bool:
        """Ship everything now and fetch once more; False if that took longer. It waits: never call it between steps."""
        if not self._exchanges:
            return self._thread is None
        done = threading.Event()
        self._jobs.append(lambda links: _begin_flush(links, done))
        return done.wait(timeout_s)

    def close(self, timeout_s: float = 1.0) -> None:
        """Ship what is left if the servers answer within `timeout_s`, then stop."""
        if self._thread is None:
            return
        self.flush(timeout_s)
        self._closing.set()
        self._thread.join()
        self._thread = None

    def _note_growth(self, streams: Sequence[Stream]) -> None:
        self._pace.called(time.monotonic())
        if self._exchanges:
            grown = [(stream.group, stream.number, stream.length) for stream in streams]
            self._jobs.append(lambda links: self._note(links, grown))

    @property
    def _exchanges(self) -> bool:
        """Whether there is a background thread to do jobs."""
        return self._thread is not None and not self._failed.is_set()

    # ---- the background thread

    def _note(self, links: list[Link], grown: list[tuple[int, int, int]]) -> None:
        now = time.monotonic()
        for group, stream, length in grown:
            replica = links[shard_of(group, len(links))].replica
            replica.note(group, stream, length, self._config.default_ttl_s, now)

    def _post(self, group: int, action: Callable[[Link], None]) -> None:
        if self._exchanges:
            self._jobs.append(lambda links: action(links[shard_of(group, len(links))]))

    def _drop(self, link: Link, group: int) -> None:
        link.replica.drop(group)
        # Again: an answer may have added the group between the caller's drop and this one.
        self.index.drop([group])

    def _work(self) -> None:
        try:
            self._synchronise()
        except Exception:
            # Without this the thread would end silently. Drafting goes on without servers.
            logger.exception("draft client stopped synchronising; drafting from local history from now on")
            self._failed.set()
            self._jobs.clear()

    def _synchronise(self) -> None:
        config = self._config
        links = [Link(address, self.index, config, self._pace) for address in config.servers]
        tick_s = min(config.fetch_every_s, config.ship_after_s / 4)
        next_expiry = time.monotonic() + 1.0
        try:
            while not self._closing.is_set():
                while self._jobs:
                    self._jobs.popleft()(links)
                for link in links:
                    link.step(time.monotonic())
                if time.monotonic() >= next_expiry:
                    self._expire(links)
                    next_expiry = time.monotonic() + 1.0
                Link.wait(links, self._pace.between_looks(tick_s, time.monotonic()))
        finally:
            for link in links:
                link.close()

    def _expire(self, links: list[Link]) -> None:
        for link in links:
            over = link.replica.expire(time.monotonic())
            if over:
                self.index.drop(over)


@lru_cache(maxsize=MAX_KEPT)
def shard_of(group: int, num_servers: int) -> int:
    """Return which server holds a group; spread evenly whatever the numbers look like."""
    return mix(group) % num_servers


def _begin_flush(links: list[Link], done: threading.Event) -> None:
    remaining = len(links)

    def one_done() -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            done.set()

    for link in links:
        link.flush(one_done)
