# SPDX-License-Identifier: Apache-2.0
"""One connection of a draft client to one server: sends what is due in the replica, and passes it the answers.

Used by the client's background thread only. Only `Link.wait` waits, for all links together and for a bounded time.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from seer.drafting.curve_keys import ClientKeys
from seer.drafting.index import DraftIndex
from seer.drafting.pace import Pace
from seer.drafting.replica import Replica
from seer.drafting.wire import MAX_MESSAGE_BYTES, Refused, Request, WireError, decode, encode

logger = logging.getLogger(__name__)

_RECONNECT_MS = 50
"""A restarted server is found again within a few steps."""
_RECONNECT_MAX_MS = 1000
"""Attempts slow down to one a second, so that a server that stays away costs nothing."""


class LinkConfig(Protocol):
    """The settings of the client that a link reads."""

    @property
    def keys(self) -> ClientKeys | None: ...  # noqa: D102
    @property
    def weights_version(self) -> int: ...  # noqa: D102
    @property
    def ship_after_s(self) -> float: ...  # noqa: D102
    @property
    def fetch_every_s(self) -> float: ...  # noqa: D102
    @property
    def answer_within_s(self) -> float: ...  # noqa: D102


class Link:
    """Synchronises one replica with its server."""

    def __init__(self, address: str, index: DraftIndex, config: LinkConfig, pace: Pace) -> None:
        """`pace` is the engine's: siblings' tokens are fetched no more often than the engine can use them."""
        self.address = address
        self._pace = pace
        self.replica = Replica(index, config.weights_version)
        self._config = config
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # never queue for a server that is not there
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        if config.keys is not None:
            config.keys.secure(self._socket)
        self._socket.connect(address)
        self._pushed_s = 0.0
        self._unreachable_since: float | None = None
        self._fetched_s: float | None = None  # None: fetch at the next step
        self._down = False
        self._flushes: list[tuple[int, Callable[[], None]]] = []

    @staticmethod
    def wait(links: Sequence["Link"], timeout_s: float) -> None:
        """Wait until an answer arrives on any link, at most `timeout_s`."""
        poller = zmq.Poller()
        for link in links:
            poller.register(link._socket, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000) + 1)

    def step(self, now: float) -> None:
        """Take in answers, notice an outage, and send what is due."""
        self._receive(now)
        patience_s = self._config.answer_within_s
        if now - self._oldest_question_s(now) > patience_s:
            self._lost(f"no answer for {patience_s:g} s")
        if not self._socket.poll(0, zmq.POLLOUT):
            # Not connected: normal while a connection is being made, an outage if it lasts.
            self._unreachable_since = now if self._unreachable_since is None else self._unreachable_since
            if now - self._unreachable_since > patience_s and not self._down:
                self._lost(f"no connection for {patience_s:g} s (is it running, and do the keys fit?)")
            return
        self._unreachable_since = None
        for notice in self.replica.next_notices():
            self._send(notice)
        due = self.replica.due_at(self._pace.between_messages(self._config.ship_after_s, now))
        hurry = bool(self._flushes)
        if due is not None and (due <= now or hurry) and not self.replica.pushing:
            self._pushed_s = now
            push = self.replica.next_push()
            if push is not None:
                self._send_question(push)
        if (self._is_fetch_due(now) or hurry) and not self.replica.fetching:
            self._fetched_s = now
            # A flush asks even without groups: the answer proves that the server handled all messages before it.
            fetch = self.replica.next_fetch(even_if_idle=hurry)
            if fetch is not None:
                self._send_question(fetch)
        self._finish_flushes()

    def _oldest_question_s(self, now: float) -> float:
        """When the older of the questions that wait for an answer was sent. Their answers may take turns."""
        pushed_s = self._pushed_s if self.replica.pushing else now
        fetched_s = self._fetched_s if self.replica.fetching and self._fetched_s is not None else now
        return min(pushed_s, fetched_s)

    def _is_fetch_due(self, now: float) -> bool:
        # Not a time kept from the last fetch: a draft since then may have made the next one due earlier.
        if self._fetched_s is None:
            return True
        return now >= self._fetched_s + self._pace.between_messages(self._config.fetch_every_s, now)

    def flush(self, done: Callable[[], None]) -> None:
        """Call `done` once everything noted so far is shipped and a fetch begun after that is answered."""
        self._flushes.append((self.replica.fetched_rounds + self.replica.fetching, done))

    def close(self) -> None:
        """Drop the connection."""
        self._socket.close()

    def _finish_flushes(self) -> None:
        waiting = []
        for rounds, done in self._flushes:
            if not self.replica.settled:
                # A fetch counts only if it began after the last push was answered.
                waiting.append((self.replica.fetched_rounds + self.replica.fetching, done))
            elif self.replica.fetched_rounds > rounds:
                done()
            else:
                waiting.append((rounds, done))
        self._flushes = waiting

    def _receive(self, now: float) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                reply = decode(frames[-1])
            except WireError as problem:
                self._lost(str(problem))
                continue
            if isinstance(reply, Refused):
                self._lost(f"it refused a message: {reply.reason}")
                continue
            if isinstance(reply, Request):
                continue
            if self.replica.receive(reply, now):
                self._fetched_s = None
            if self._down:
                self._down = False
                logger.info("draft server %s is back", self.address)

    def _send_question(self, message: Request) -> None:
        if not self._send(message):
            self.replica.lose()  # the connection just broke; none of this was sent

    def _send(self, message: Request) -> bool:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _lost(self, why: str) -> None:
        self.replica.lose()
        if not self._down:
            self._down = True
            logger.warning("draft server %s: %s; drafting from local history until it is back", self.address, why)
