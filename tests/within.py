# SPDX-License-Identifier: Apache-2.0
"""Tests that are coroutines, with a deadline: one that waits for ever fails."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


def within(deadline_s: float) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]:
    """Runs the test in an event loop of its own."""

    def plain_test(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @functools.wraps(test)  # pytest reads the fixtures from its signature
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            async def bounded() -> None:
                async with asyncio.timeout(deadline_s):
                    await test(*args, **kwargs)

            asyncio.run(bounded())

        return run

    return plain_test
