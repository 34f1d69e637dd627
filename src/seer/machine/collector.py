# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector, held back while a rollout runs.

With 100,000 requests in flight the collector took half of the driver's time, and each full collection stopped all
decisions for up to 0.9 s (docs/log.md), though requests and their tokens end by reference counts.

The heap is not frozen: `gc.freeze` also forgets how much garbage is new, so between short rollouts the collector never
looked at what earlier ones had left, and a driver grew by 2 KiB a request for as long as it lived.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

SELDOM = (20_000, 20, 100)
"""Collect young objects after this many new ones, older ones after this many collections; Python has 700, 10 and 10."""


class _Collector:
    """Held back by any number of rollouts at once: the first sets the thresholds, the last gives them back."""

    def __init__(self) -> None:
        self._num_rollouts = 0
        self._found = gc.get_threshold()

    def hold_back(self) -> None:
        self._num_rollouts += 1
        if self._num_rollouts > 1:
            return
        self._found = gc.get_threshold()
        if self._found[0]:  # zero: someone has turned the collector off
            gc.set_threshold(*(max(pair) for pair in zip(self._found, SELDOM, strict=True)))

    def let_go(self) -> None:
        self._num_rollouts -= 1
        if not self._num_rollouts:
            gc.set_threshold(*self._found)


_collector = _Collector()


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """Garbage is collected more seldom until the end of the block. A collector that others turned off stays off."""
    _collector.hold_back()
    try:
        yield
    finally:
        _collector.let_go()
