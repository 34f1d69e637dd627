# SPDX-License-Identifier: Apache-2.0
"""Blocking calls off the event loop: it stays live, and no cancelled call is left behind with its buffers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from seer.kvpool.offload import Offload

DEADLINE_S = 20


def run(scenario) -> None:  # type: ignore[no-untyped-def]
    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_the_loop_stays_live_while_a_call_blocks() -> None:
    async def scenario() -> None:
        offload, gate = Offload("t", 1), threading.Event()
        call = asyncio.ensure_future(offload.run(gate.wait, DEADLINE_S))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not call.done()
        gate.set()
        assert await call is True
        offload.close()

    run(scenario)


def test_a_cancelled_call_ends_only_when_its_thread_has() -> None:
    async def scenario() -> None:
        offload, began, gate, ended = Offload("t", 1), threading.Event(), threading.Event(), threading.Event()

        def work() -> None:
            began.set()
            assert gate.wait(DEADLINE_S)
            ended.set()

        call = asyncio.ensure_future(offload.run(work))
        assert await asyncio.to_thread(began.wait, DEADLINE_S)
        call.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        call.cancel()  # asking twice does not help
        for _ in range(100):
            await asyncio.sleep(0)
        assert not call.done(), "the call was let go while its thread still had the buffers"
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert ended.is_set()
        offload.close()

    run(scenario)


def test_an_error_reaches_the_one_who_awaits() -> None:
    async def scenario() -> None:
        offload = Offload("t", 1)
        with pytest.raises(ZeroDivisionError):
            await offload.run(lambda: 1 // 0)
        offload.close()

    run(scenario)
