# SPDX-License-Identifier: Apache-2.0
"""Calls that wait for a process's answers: each ends once, with its own answer or with the loss of the process."""

from __future__ import annotations

import asyncio

import pytest

from seer.errors import ConfigError, InstanceError
from seer.hosting.messages import CallResult
from seer.hosting.open_calls import OpenCalls


def test_each_call_has_its_own_answer() -> None:
    async def scenario() -> None:
        calls = OpenCalls()
        (first, its), (second, other) = calls.open(), calls.open()
        calls.settle(3, CallResult(second, "no such folder", ConfigError.__name__, "make one"))
        assert not its.done()
        with pytest.raises(ConfigError, match="instance 3: no such folder") as caught:
            await other
        assert caught.value.hint == "make one"
        calls.settle(3, CallResult(first))
        await its

    asyncio.run(scenario())


def test_a_lost_process_answers_all_and_late_answers_are_dropped() -> None:
    async def scenario() -> None:
        calls = OpenCalls()
        (first, its), (second, other) = calls.open(), calls.open()
        calls.forget(second)
        calls.fail("instance 3 was lost: it left")
        with pytest.raises(InstanceError, match="it left"):
            await its
        assert not other.done()
        calls.settle(3, CallResult(first))
        calls.settle(3, CallResult(second))
        assert not other.done()
        third, _ = calls.open()
        assert third not in (first, second)

    asyncio.run(scenario())
