# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector, held back while a rollout runs.

With 100,000 requests in flight the collector took half of the driver's time, and each full collection stopped all
decisions for up to 0.9 s (docs/log.md), though requests and their tokens end by reference counts.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

SELDOM = (20_000, 20, 100)
"""Collect young objects after this many new ones, older ones after this many collections; Python has 700, 10 and 10."""


class _Collector:
    """Held back by any number of rollouts at once: the first freezes the heap, the last thaws it."""

    def __init__(self) -> None:
        self._num_rollouts = 0
        self._found = gc.get_threshold()
        self._has_frozen = False

    def hold_back(self) -> None:
        self._num_rollouts += 1
        if self._num_rollouts > 1:
            return
        self._found = gc.get_threshold()
        self._has_frozen = not gc.get_freeze_count()
        if self._has_frozen:
            gc.freeze()
        if self._found[0]:  # zero: someone has turned the collector off
            gc.set_threshold(*(max(pair) for pair in zip(self._found, SELDOM, strict=True)))

    def let_go(self) -> None:
        self._num_rollouts -= 1
        if self._num_rollouts:
            return
        gc.set_threshold(*self._found)
        if self._has_frozen:
            gc.unfreeze()


_collector = _Collector()


@contextlib.contextmanager
def heap_at_rest() -> Iterator[None]:
    """What exists now is not looked at until the end of the block, and what is new more seldom.

    A heap that others froze, and a collector that they turned off, stay as they are.
    """
    _collector.hold_back()
    try:
        yield
    finally:
        _collector.let_go()
