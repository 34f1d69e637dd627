# SPDX-License-Identifier: Apache-2.0
"""Calls of the user's code end for their caller by their deadline, whatever the code does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
from typing import Any

import pytest

from seer.errors import DeadlineExceeded, SeerError
from seer.runs.keeping import KeepCalls
from seer.runs.user_calls import UserCalls, reason
from seer.types import GroupResult

GROUP = GroupResult(group=0, prompt_id="p", prompt_token_ids=(1,), responses=())

SWALLOWS = """
import asyncio
from seer.errors import DeadlineExceeded
from seer.runs.user_calls import UserCalls

async def swallows():
    while True:
        try:
            await asyncio.sleep(1000)
        except BaseException:
            pass

async def main():
    calls = UserCalls(ending_s=0.01)
    try:
        await calls.answer("tool", swallows, deadline_s=0.01)
    except DeadlineExceeded as error:
        print(error)
    await calls.close()
    print(calls.num_abandoned)

asyncio.run(main())
"""


async def swallows() -> float:
    """As a tool with an `except:` in a loop of retries."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


def test_a_call_that_swallows_its_cancellation_is_abandoned_named_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        calls, before = UserCalls(ending_s=0.01), UserCalls.num_abandoned_in_process
        for _ in range(3):
            with pytest.raises(DeadlineExceeded, match=r"tool of prompt 7 took longer than 0.01 s"):
                await calls.answer("tool of prompt 7", swallows, deadline_s=0.01)
        await calls.close()
        assert calls.num_abandoned == 3
        assert UserCalls.num_abandoned_in_process - before == 3, "for metrics, which outlive a run"

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())  # which waits for every task that it knows
    said = [record.getMessage() for record in caplog.records if "abandoned" in record.getMessage()]
    assert said == [
        "tool of prompt 7 ignored its cancellation for 0.01 s and is abandoned",
        "3 calls ignored their cancellation and were abandoned",
    ]


def test_a_program_ends_though_a_call_swallows_everything() -> None:
    """Also while it is freed: that throws GeneratorExit into it."""
    ended = subprocess.run([sys.executable, "-c", SWALLOWS], timeout=60, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n")[:2] == ["tool took longer than 0.01 s", "1"]


def test_a_call_that_was_given_up_may_clean_up_before_close_returns() -> None:
    cleaned: list[str] = []

    async def cleans_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("process collected")

    async def scenario() -> None:
        calls = UserCalls()
        with pytest.raises(DeadlineExceeded):
            await calls.answer("tool", cleans_up, deadline_s=0.01)
        await calls.close()
        assert (cleaned, calls.num_abandoned) == (["process collected"], 0)

    asyncio.run(scenario())


def test_a_caller_that_is_cancelled_leaves_at_once_and_takes_its_call_along() -> None:
    async def scenario() -> None:
        calls, began, ended = UserCalls(), asyncio.Event(), asyncio.Event()

        async def waits() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        caller = asyncio.create_task(calls.answer("tool", waits, deadline_s=60.0))
        await began.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await ended.wait()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (SystemExit(2), "tool: SystemExit: 2"),
        (asyncio.CancelledError(), "tool: CancelledError, and it had not been cancelled"),
        (TimeoutError("of its own"), "tool: TimeoutError: of its own"),
        (SeerError("the code forked"), "tool: the code forked"),
        (ValueError("bad \ud800 text"), "tool: ValueError: bad ? text"),
    ],
)
def test_what_code_raises_is_the_reason_and_ends_no_loop(error: BaseException, why: str) -> None:
    async def raises() -> None:
        raise error

    async def scenario() -> str:
        try:
            await UserCalls().answer("tool", raises, deadline_s=60.0)
        except Exception as failure:
            return reason("tool", failure)
        return "nothing was raised"

    assert asyncio.run(scenario()) == why


def test_an_interrupt_from_the_keyboard_stays_one() -> None:
    async def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(UserCalls().answer("tool", interrupted, deadline_s=60.0))


def test_places_of_abandoned_calls_are_free_again() -> None:
    async def one() -> float:
        return 1.0

    async def scenario() -> None:
        calls, places = UserCalls(ending_s=0.01), asyncio.Semaphore(1)
        with pytest.raises(DeadlineExceeded):
            await calls.answer("hangs", swallows, deadline_s=0.01, places=places)
        assert await calls.answer("works", one, deadline_s=60.0, places=places) == 1.0
        await calls.close()

    asyncio.run(scenario())


def test_a_keep_that_hangs_misses_its_deadline_by_name() -> None:
    async def waits(group: GroupResult) -> bool:
        return bool(await swallows())

    def hangs(group: GroupResult) -> bool:
        return threading.Event().wait()

    def leaves(group: GroupResult) -> bool:
        sys.exit("enough")

    async def scenario(keep: Any, deadline_s: float) -> None:
        calls = UserCalls(ending_s=0.01)
        try:
            await KeepCalls(keep, calls, deadline_s=deadline_s).wants(GROUP)
        finally:
            await calls.close()

    for keep in (waits, hangs):
        with pytest.raises(DeadlineExceeded, match=rf"keep .*{keep.__name__} of prompt p took longer than 0.01 s"):
            asyncio.run(scenario(keep, 0.01))
    with pytest.raises(SeerError, match="SystemExit: enough"):
        asyncio.run(scenario(leaves, 60.0))


def test_a_plain_keep_is_called_one_group_at_a_time() -> None:
    running = threading.Semaphore(1)

    def counts(group: GroupResult) -> bool:
        with_others = not running.acquire(blocking=False)
        threading.Event().wait(0.01)
        if not with_others:
            running.release()
        return not with_others

    async def scenario() -> list[bool]:
        keep = KeepCalls(counts, UserCalls(), deadline_s=60.0)
        return await asyncio.gather(*(keep.wants(GROUP) for _ in range(8)))

    assert asyncio.run(scenario()) == [True] * 8
