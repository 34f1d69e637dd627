# SPDX-License-Identifier: Apache-2.0
"""Outputs on their way to the loop: which are due at once, which wait for others, and what a wait ends with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from seer.errors import DeadlineExceeded
from seer.inbox import Inbox
from seer.sim import virtual_time
from seer.types import ChunkEnd, ChunkOutput

GATHER_S = 0.25


def tokens(request: int) -> ChunkOutput:
    return ChunkOutput(request, 0, 0, 4)


def ending(request: int) -> ChunkOutput:
    return ChunkOutput(request, 0, 0, 4, end=ChunkEnd.STOP)


def nothing() -> str:
    return "waiting for nothing"


def waited(scenario: Callable[[Inbox], Awaitable[None]], deadline_s: float | None = None) -> tuple[float, list[int]]:
    """Seconds until a wait ended that began after the scenario, and the requests whose outputs were then taken."""
    found: list[tuple[float, list[int]]] = []

    async def run() -> None:
        inbox = Inbox(GATHER_S)
        began_s = asyncio.get_running_loop().time()
        await scenario(inbox)
        await inbox.wait(deadline_s, nothing)
        found.append((asyncio.get_running_loop().time() - began_s, [one.request for one in inbox.take()]))
        assert not inbox.take(), "each output is taken once"

    virtual_time.run(run())
    return found[0]


def test_outputs_that_only_bring_tokens_wait_for_others() -> None:
    async def scenario(inbox: Inbox) -> None:
        inbox.put(tokens(1))
        asyncio.get_running_loop().call_later(GATHER_S / 2, inbox.put, tokens(2))

    assert waited(scenario) == (GATHER_S, [1, 2])


def test_an_end_is_due_at_once_and_brings_what_waits_in_order() -> None:
    async def scenario(inbox: Inbox) -> None:
        inbox.put(tokens(1))
        asyncio.get_running_loop().call_later(GATHER_S / 2, inbox.put, ending(2))

    assert waited(scenario) == (GATHER_S / 2, [1, 2])


def test_what_is_due_before_the_wait_is_not_waited_for() -> None:
    async def scenario(inbox: Inbox) -> None:
        inbox.put(ending(1))
        inbox.put(tokens(2))

    assert waited(scenario) == (0.0, [1, 2])


def test_a_wait_ends_when_there_is_something_else_to_look_at() -> None:
    async def scenario(inbox: Inbox) -> None:
        asyncio.get_running_loop().call_later(3.0, inbox.wake)

    assert waited(scenario, 5.0) == (3.0, [])


def test_taken_outputs_make_no_later_wait_end() -> None:
    async def scenario(inbox: Inbox) -> None:
        inbox.put(tokens(1))
        assert [one.request for one in inbox.take()] == [1]
        inbox.put(ending(2))
        assert [one.request for one in inbox.take()] == [2]
        asyncio.get_running_loop().call_later(2.0, inbox.put, ending(3))

    assert waited(scenario) == (2.0, [3])


def test_a_wait_without_an_output_ends_at_its_deadline_and_says_what_for() -> None:
    async def scenario(inbox: Inbox) -> None:
        asyncio.get_running_loop().call_later(8.0, inbox.put, ending(1))

    with pytest.raises(DeadlineExceeded, match="waiting for nothing"):
        waited(scenario, 7.0)
