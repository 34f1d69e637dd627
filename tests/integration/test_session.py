# SPDX-License-Identifier: Apache-2.0
"""Sessions over instances in child processes: prompts at any time, each response when it ends; the fake engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults import KillOnce
from seer import FinishReason, HostingConfig, ResponseHandle, Rollout, Sampling, SeerError, Session
from seer.buffer import request_seed
from seer.errors import ConfigError, InputError
from seer.metrics.events import Event, Queued
from seer.types import TokenSpan

PROMPTS = [[1, 2, 3 + i] for i in range(8)]
SAMPLING = Sampling(max_tokens=120)
QUICK = HostingConfig(pin_cores=False, heartbeat_s=0.1, silence_deadline_s=2.0, progress_deadline_s=5.0)
Tokens = dict[tuple[int, int], list[int]]


def a_rollout(instances: int = 2, **settings: Any) -> Rollout:
    engine_settings = {"step_s": settings.pop("step_s", 0.0)}
    return Rollout(
        "none", engine="fake", instances=instances, engine_settings=engine_settings, hosting=QUICK, **settings
    )


async def tokens_of_a_run(rollout: Rollout) -> Tokens:
    groups = [group async for group in rollout.run(PROMPTS, n=4, sampling=SAMPLING)]
    return {(r.group, r.index): r.token_ids for group in groups for r in group.responses}


def submit(session: Session, prompt: int, **settings: Any) -> list[ResponseHandle]:
    return session.submit(PROMPTS[prompt], n=4, sampling=SAMPLING, seed=request_seed(0, prompt), **settings)


def test_responses_that_are_asked_for_while_others_run_have_the_tokens_of_a_run() -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout:
            expected = await tokens_of_a_run(rollout)
            async with rollout.session() as session:
                first = [submit(session, prompt) for prompt in range(4)]
                await first[0][0]
                handles = first + [submit(session, prompt) for prompt in range(4, 8)]
                found = {
                    (p, i): (await handle).token_ids
                    for p, group in enumerate(handles)
                    for i, handle in enumerate(group)
                }
                assert found == expected
                assert session.num_waiting == session.num_in_flight == 0
            assert await tokens_of_a_run(rollout) == expected  # the fleet is free for a run again

    asyncio.run(scenario())


def test_seeds_and_counts_of_numpy_give_the_same_tokens() -> None:
    async def tokens(number: Callable[[int], Any]) -> list[list[int]]:
        async with a_rollout() as rollout:
            groups = rollout.run([PROMPTS[0]], n=number(2), sampling=SAMPLING, seed=number(3))
            found = [r.token_ids async for group in groups for r in group.responses]
            async with rollout.session(seed=number(5)) as session:
                for settings in ({"seed": number(4)}, {}):
                    handles = session.submit(PROMPTS[1], n=number(2), sampling=SAMPLING, **settings)
                    found += [(await handle).token_ids for handle in handles]
            return found

    assert asyncio.run(tokens(np.int64)) == asyncio.run(tokens(int))


def test_tokens_stream_once_and_in_order_although_an_instance_is_killed() -> None:
    async def scenario() -> None:
        streamed: defaultdict[ResponseHandle, list[int]] = defaultdict(list)

        def on_tokens(handle: ResponseHandle, span: TokenSpan) -> None:
            assert not handle.done()
            streamed[handle].extend(span.ids)

        async with a_rollout(step_s=0.001) as rollout:
            kill = KillOnce(rollout.fleet.instances[0], request=3)
            async with rollout.session(events=kill) as session:
                handles = [handle for p in range(8) for handle in submit(session, p, on_tokens=on_tokens)]
                for handle in handles:
                    assert (await handle).token_ids == streamed[handle]
            assert rollout.fleet.num_lost >= 1

    asyncio.run(scenario())


def test_late_members_of_a_named_group_have_the_next_indices_and_share_its_events() -> None:
    async def scenario() -> None:
        queued: list[Queued] = []

        def note(event: Event) -> None:
            if isinstance(event, Queued):
                queued.append(event)

        async with a_rollout() as rollout, rollout.session(events=note) as session:
            first = submit(session, 0, group="a")
            for handle in first:
                await handle
            late = session.submit([7] * 40, sampling=SAMPLING, group="a")  # another prompt, as a next turn has
            other = submit(session, 1, group="b")
            assert [handle.index for handle in [*first, *late, *other]] == [0, 1, 2, 3, 4, 0, 1, 2, 3]
            assert (await late[0]).prompt_id == "a"
            await session.drain()
        assert [event.group for event in queued] == [0] * 5 + [2] * 4

    asyncio.run(scenario())


def test_a_cancelled_response_ends_with_its_tokens_and_the_others_go_on() -> None:
    async def scenario() -> None:
        started = asyncio.Event()
        async with a_rollout(step_s=0.001) as rollout:
            expected = await tokens_of_a_run(rollout)
            async with rollout.session() as session:
                running = submit(session, 0, on_tokens=lambda handle, span: started.set())
                await started.wait()
                running[1].cancel()
                running[1].cancel()
                cancelled = await running[1]
                assert cancelled.finish_reason is FinishReason.CANCELLED
                whole = expected[0, 1]
                assert cancelled.token_ids == whole[: cancelled.num_tokens] != whole
                assert [(await running[i]).token_ids for i in (0, 2, 3)] == [expected[0, i] for i in (0, 2, 3)]
                running[0].cancel()  # has ended: nothing happens

    asyncio.run(scenario())


def test_a_response_that_is_cancelled_while_it_waits_never_starts() -> None:
    async def scenario() -> None:
        async with a_rollout(1) as rollout, rollout.session() as session:
            handles = submit(session, 0)
            for handle in handles:
                handle.cancel()  # before the loop's next turn
            assert [(await handle).started_s for handle in handles] == [None] * 4
            assert [(await handle).num_tokens for handle in submit(session, 1)] != [0] * 4

    asyncio.run(scenario())


def test_new_weights_wait_for_what_was_asked_before_and_precede_what_is_asked_after(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(step_s=0.001) as rollout, rollout.session() as session:
            before = submit(session, 0)
            change = asyncio.create_task(session.update_weights(tmp_path))
            await asyncio.sleep(0)
            after = submit(session, 1)
            assert session.num_waiting >= 4  # held
            assert await change == 1
            assert {(await handle).weights_version for handle in before} == {0}
            assert {(await handle).weights_version for handle in after} == {1}

    asyncio.run(scenario())


def test_a_change_of_weights_that_is_cancelled_has_not_happened(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(step_s=0.002) as rollout, rollout.session() as session:
            before = submit(session, 0)
            change = asyncio.create_task(session.update_weights(tmp_path))
            await asyncio.sleep(0)
            held = submit(session, 1)
            change.cancel()
            with pytest.raises(asyncio.CancelledError):
                await change
            after = submit(session, 2)
            assert {(await handle).weights_version for handle in before + held + after} == {0}
            await session.drain()
            assert await session.update_weights(tmp_path) == 1

    asyncio.run(scenario())


def test_a_change_of_weights_that_is_cancelled_as_the_last_request_ends_leaves_a_session(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout, rollout.session() as session:
            pump = session._pump
            change = asyncio.create_task(session.update_weights(tmp_path))
            assert pump is not None, "it is open"
            pump.add_done_callback(lambda _: change.cancel())  # before the change hears of the end
            with pytest.raises(asyncio.CancelledError):
                await change
            assert (await submit(session, 0)[0]).weights_version == 0
            assert await session.update_weights(tmp_path) == 1

    asyncio.run(scenario())


def test_a_session_that_is_closed_before_its_weights_change_ends_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(step_s=0.01) as rollout:
            async with rollout.session() as session:
                before = submit(session, 0)
                change = asyncio.create_task(session.update_weights(tmp_path))
                await asyncio.sleep(0)
                held = submit(session, 1)
            assert {(await handle).finish_reason for handle in before} == {FinishReason.CANCELLED}
            for handle in held:
                with pytest.raises(SeerError, match="closed"):
                    await handle
            with pytest.raises(SeerError, match="closed"):
                await change
            assert rollout.weights_version == 0
            await tokens_of_a_run(rollout)  # the fleet is free

    asyncio.run(scenario())


def test_a_session_that_is_closed_while_its_weights_change_ends_after_that(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout:
            begun, may_end = asyncio.Event(), asyncio.Event()

            async def change() -> None:
                begun.set()
                await may_end.wait()
                await rollout.fleet.update_weights(tmp_path)

            async with rollout.session() as session:
                changing = asyncio.create_task(session.change_weights(change))
                await begun.wait()
                asyncio.get_running_loop().call_soon(may_end.set)
            assert rollout.weights_version == 1
            await changing
            await tokens_of_a_run(rollout)

    asyncio.run(scenario())


def test_a_handle_ends_even_if_the_end_of_its_session_is_cancelled() -> None:
    async def scenario() -> None:
        async with a_rollout(1) as rollout:
            async with rollout.session() as session:
                rollout.fleet.instances[0].abort = lambda request: None  # type: ignore[method-assign]
                os.kill(rollout.fleet.instances[0].pid or 0, signal.SIGSTOP)
                handles = submit(session, 0)
                closing = asyncio.create_task(session.close())
                await asyncio.sleep(0)
                closing.cancel()
                await asyncio.gather(closing, return_exceptions=True)
                for handle in handles:
                    with pytest.raises(SeerError, match="the session was closed"):
                        await handle
            rollout.fleet.kill()

    asyncio.run(scenario())


def test_a_closed_session_fails_what_it_held_and_takes_nothing_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_rollout(step_s=0.01) as rollout:
            async with rollout.session() as session:
                handles = submit(session, 0)
            assert {(await handle).finish_reason for handle in handles} == {FinishReason.CANCELLED}
            with pytest.raises(SeerError, match="closed"):
                submit(session, 1)
            await tokens_of_a_run(rollout)

    asyncio.run(scenario())


def test_bad_submissions_are_refused_at_once_and_harm_nothing() -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout, rollout.session() as session:
            with pytest.raises(InputError, match="at least one token id"):
                session.submit([], sampling=SAMPLING)
            with pytest.raises(SeerError, match="tokens"):
                session.submit([1], sampling=Sampling(max_tokens=10**7))
            with pytest.raises(ConfigError, match="seed"):
                session.submit([1], sampling=SAMPLING, seed=-1)
            assert (await submit(session, 0)[0]).is_complete
        async with a_rollout(1) as rollout:
            with pytest.raises(ConfigError, match="all prompts at once"):
                rollout.session(scheduler="verl-sync")

    asyncio.run(scenario())


def test_a_session_without_end_keeps_nothing_of_what_it_delivered() -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout, rollout.session() as session:
            for round in range(20):
                handles = submit(session, round % 8, group=f"g{round}" if round % 2 else None)
                handles[0].cancel()
                for handle in handles:
                    await handle
                session.end_group(f"g{round}")
            await submit(session, 0)[0]
            await session.drain()
            assert session.loop is not None
            await asyncio.sleep(0)
            assert len(list(session.loop.buffer.requests())) <= 4  # of the last group, which may just have ended
            scheduler: Any = session.loop.scheduler
            assert not any(scheduler._ordering._by_memory._expected.keys() - {20})
            assert not session.loop.fleet._prompt_home.keys() - {20}

    asyncio.run(scenario())


def test_when_the_fleet_fails_every_handle_says_why() -> None:
    async def scenario() -> None:
        rollout = a_rollout(1)
        object.__setattr__(rollout.engine, "factory", "host_fakes:make_crashing")
        async with rollout, rollout.session() as session:
            handles = submit(session, 0)
            for handle in handles:
                with pytest.raises(SeerError, match="instance"):
                    await handle
            with pytest.raises(SeerError):
                submit(session, 1)

    asyncio.run(scenario())
