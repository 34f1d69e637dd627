# SPDX-License-Identifier: Apache-2.0
"""Random programs in virtual time: the clock never runs backwards, and equal times keep their order."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from seer.sim import virtual_time

DELAYS = st.lists(st.tuples(st.floats(0, 10), st.floats(-5, 5), st.booleans()), max_size=30)


@given(delays=DELAYS)
def test_time_never_runs_backwards(delays: list[tuple[float, float, bool]]) -> None:
    seen: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def at_first(again_s: float) -> None:
            seen.append(loop.time())
            loop.call_later(again_s, lambda: seen.append(loop.time()))  # may ask for the past

        for delay_s, again_s, cancelled in delays:
            timer = loop.call_later(delay_s, at_first, again_s)
            if cancelled:
                timer.cancel()
        await asyncio.sleep(100)
        seen.append(loop.time())

    virtual_time.run(main())
    assert seen == sorted(seen)
    assert len(seen) == 1 + 2 * sum(not cancelled for _, _, cancelled in delays)
    assert seen[-1] == 100


@given(delays=st.lists(st.integers(0, 3), max_size=40))
def test_equal_times_run_in_the_order_of_scheduling(delays: list[int]) -> None:
    seen: list[tuple[int, int]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number, delay in enumerate(delays):
            loop.call_later(delay, seen.append, (delay, number))
        await asyncio.sleep(10)

    virtual_time.run(main())
    assert seen == sorted((delay, number) for number, delay in enumerate(delays))
