# SPDX-License-Identifier: Apache-2.0
"""Run a blocking pool call off the event loop.

Invariants
  1. The event loop never blocks on the pool.
  2. A cancelled call is waited for before the cancellation goes on: its thread may still be writing into the
     caller's buffers, which must not be reused until it ends. Pool calls have deadlines, so this wait ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Offload:
    """A few threads for the blocking calls of one pool."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `call` in a thread and return its result."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._executor, lambda: call(*args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:  # cancelled again: the thread still has to end first
                    continue
            raise

    def start(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run `call` in a thread in the background; its result is dropped."""
        self._executor.submit(call, *args, **kwargs)

    def close(self) -> None:
        """Wait for the running calls; those not begun are dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)
