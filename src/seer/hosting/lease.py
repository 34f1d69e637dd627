# SPDX-License-Identifier: Apache-2.0
"""How long an instance on another machine serves a driver that it does not hear.

A driver's process that ends is seen at once. A driver whose machine or link is gone is not: without a lease the
instance would hold its GPUs for ever. The driver sends something with every heartbeat.

The watch is a thread, so it also ends a process whose event loop hangs. After a time in which this process itself got
no core, messages wait unread: so an expired lease gets GRACE_S in which the event loop can read them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

GRACE_S = 1.0


class Lease:
    """Calls `on_expired` once, in a thread of its own, when no `renew` has come for `silence_s`."""

    def __init__(self, silence_s: float, on_expired: Callable[[], None]) -> None:
        self._silence_s = silence_s
        self._on_expired = on_expired
        self._renewed_s = time.monotonic()
        self._is_over = threading.Event()

    def start(self) -> None:
        """Count from now."""
        self.renew()
        threading.Thread(target=self._watch, name="watch-lease", daemon=True).start()

    def renew(self) -> None:
        """The driver was heard."""
        self._renewed_s = time.monotonic()

    def end(self) -> None:
        """Watch no more."""
        self._is_over.set()

    def _watch(self) -> None:
        while (left_s := self._left_s()) > 0 or self._has_grace():
            if self._is_over.wait(max(left_s, 0.0)):
                return
        self._on_expired()

    def _has_grace(self) -> bool:
        """Whether a message is read, or the watch ends, within GRACE_S."""
        return self._is_over.wait(GRACE_S) or self._left_s() > 0

    def _left_s(self) -> float:
        return self._renewed_s + self._silence_s - time.monotonic()
