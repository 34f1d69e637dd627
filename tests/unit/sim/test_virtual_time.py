# SPDX-License-Identifier: Apache-2.0
"""The virtual clock: it jumps, keeps the order of events, and reports a deadlock."""

import asyncio

import pytest

from seer.sim import virtual_time


def test_an_hour_passes_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 3600


def test_callbacks_due_at_the_same_time_run_in_the_order_they_were_scheduled() -> None:
    seen: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (3, 1, 2):
            loop.call_at(5.0, seen.append, number)
        loop.call_at(4.0, seen.append, 0)
        await asyncio.sleep(6)

    virtual_time.run(main())
    assert seen == [0, 3, 1, 2]


def test_the_past_counts_as_now() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times: list[float] = []
        await asyncio.sleep(10)
        loop.call_at(3.0, lambda: times.append(loop.time()))
        await asyncio.sleep(1)
        return times

    assert virtual_time.run(main()) == [10.0]


def test_a_cancelled_timer_neither_runs_nor_moves_the_clock() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(100, lambda: pytest.fail("it was cancelled")).cancel()
        await asyncio.sleep(1)
        return loop.time()

    assert virtual_time.run(main()) == 1.0


def test_timeouts_are_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=30)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == 30.0


def test_a_deadlock_is_an_error_that_says_so() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    loop = virtual_time.VirtualTimeLoop()  # type: ignore[abstract]
    task = loop.create_task(main())
    with pytest.raises(RuntimeError, match="deadlock in virtual time"):
        loop.run_until_complete(task)
    task.cancel()
    loop.run_forever()
    loop.close()


def test_an_exception_in_a_callback_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 // 0)
        await asyncio.sleep(5)

    loop = virtual_time.VirtualTimeLoop()  # type: ignore[abstract]
    task = loop.create_task(main())
    with pytest.raises(ZeroDivisionError):
        loop.run_until_complete(task)
    task.cancel()
    loop._failure = None
    loop.run_forever()
    loop.close()


def test_two_equal_programs_run_equally() -> None:
    async def main() -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[float, int]] = []

        async def worker(number: int) -> None:
            for round_number in range(5):
                await asyncio.sleep((number * 7 + round_number * 3) % 4)
                seen.append((loop.time(), number))

        await asyncio.gather(*(worker(number) for number in range(8)))
        return seen

    assert virtual_time.run(main()) == virtual_time.run(main())
