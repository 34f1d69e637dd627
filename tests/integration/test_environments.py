# SPDX-License-Identifier: Apache-2.0
"""Rollouts with an environment over instances in child processes, with the fake engine: tokens in, tokens out."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from faults import KillOnce
from seer import FinishReason, HostingConfig, Rollout, Sampling
from seer.engine.fake import END_TOKEN, fake_stop, fake_token
from seer.environments.base import Answer, Conversation, End, Key, Reply
from seer.errors import ConfigError, InputError
from seer.metrics.events import Asked, Ended, Event, discard
from seer.runs import user_calls
from seer.runs.fleet_sample import fleet_sample
from seer.types import Response

PROMPTS = [[1, 2, 3 + i] for i in range(4)]
MAX_TOKENS = 60
SAMPLING = Sampling(max_tokens=MAX_TOKENS)
QUICK = HostingConfig(pin_cores=False, heartbeat_s=0.1, silence_deadline_s=2.0, progress_deadline_s=5.0)
Responses = dict[tuple[int, int], Response]


def a_rollout(instances: int = 2, step_s: float = 0.0) -> Rollout:
    return Rollout("none", engine="fake", instances=instances, engine_settings={"step_s": step_s}, hosting=QUICK)


async def three_turns(conversation: Conversation) -> Answer:
    """Gives some tokens after each turn but the third; the reward is the number of turns."""
    if conversation.turn == 3 or conversation.finish_reason is FinishReason.LENGTH:
        return End(reward=float(conversation.turn))
    await asyncio.sleep(0)
    return Reply(token_ids=[900 + conversation.turn] * 4)


def expected(seed: int) -> tuple[list[int], list[int]]:
    """Tokens and mask of `three_turns`, from the fake's own rules."""
    ids: list[int] = []
    mask: list[int] = []
    for turn in range(1, 4):
        start = sum(mask)
        stop = fake_stop(seed, MAX_TOKENS, start)
        ids += [fake_token(seed, len(ids) + i) for i in range(stop - start - 1)] + [END_TOKEN]
        mask += [1] * (stop - start)
        if turn == 3 or stop == MAX_TOKENS:
            break
        ids, mask = ids + [900 + turn] * 4, mask + [0] * 4
    return ids, mask


async def rolled_out(rollout: Rollout, environment: Any = three_turns, **settings: Any) -> Responses:
    found: Responses = {}
    async for group in rollout.run(PROMPTS, n=4, sampling=SAMPLING, environment=environment, **settings):
        found.update({(r.group, r.index): r for r in group.responses})
    return found


def check(responses: Responses) -> None:
    assert len(responses) == 16
    for response in responses.values():
        assert (response.token_ids, response.loss_mask) == expected(response.seed)
        num_turns = sum(turn.kind == "generated" for turn in response.turns)
        assert (response.reward, response.is_complete) == (float(num_turns), True)


def test_responses_go_on_after_their_environments_answers() -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout:
            check(await rolled_out(rollout))
            for scheduler in ("verl", "divided"):
                check(await rolled_out(rollout, scheduler=scheduler))

    asyncio.run(scenario())


def test_an_instance_that_dies_changes_nothing() -> None:
    async def scenario() -> None:
        async with a_rollout(step_s=0.001) as rollout:
            check(await rolled_out(rollout, events=KillOnce(rollout.fleet.instances[0], request=5)))
            assert rollout.fleet.num_lost >= 1

    asyncio.run(scenario())


def test_the_environment_sees_the_conversation_so_far_and_its_end() -> None:
    seen: dict[Key, list[Conversation]] = {}
    closed: list[Key] = []

    class Watching:
        async def __call__(self, conversation: Conversation) -> Answer:
            seen.setdefault(conversation.key, []).append(conversation)
            return await three_turns(conversation)

        def close(self, key: Key) -> None:
            closed.append(key)

    async def scenario() -> None:
        async with a_rollout() as rollout:
            responses = await rolled_out(rollout, Watching())
            assert sorted(closed) == sorted(responses) == sorted(seen)
            for key, response in responses.items():
                for number, one in enumerate(seen[key], start=1):
                    assert one.turn == number
                    assert list(one.token_ids) == response.token_ids[: len(one.token_ids)]
                    assert list(one.new_token_ids)[-1] == END_TOKEN
                    assert list(one.prompt_token_ids) == PROMPTS[one.group]
                    assert [m["role"] for m in one.messages] == ["assistant", "tool"] * (number - 1) + ["assistant"]
                assert list(seen[key][-1].token_ids) == response.token_ids

    asyncio.run(scenario())


def test_tools_that_fail_hang_or_answer_nonsense_end_their_response_with_the_reason() -> None:
    async def environment(conversation: Conversation) -> Any:
        if conversation.group == 0:
            raise ZeroDivisionError("by zero")
        if conversation.group == 1:
            await asyncio.Event().wait()
        if conversation.group == 2:
            return "more text" if conversation.index else Reply(token_ids=[-1])
        return await three_turns(conversation)

    async def scenario() -> None:
        async with a_rollout() as rollout:
            found = await rolled_out(rollout, environment, environment_deadline_s=0.05)
            reasons = ["ZeroDivisionError: by zero", "longer than 0.05 s", "it answered 'more text'"]
            for group, reason in enumerate(reasons):
                failed = found[group, 1]
                assert failed.finish_reason is FinishReason.FAILED
                assert failed.error is not None
                assert reason in failed.error
                assert "turn 1" in failed.error
                assert failed.token_ids  # what was generated is kept
            assert "token ids from -1" in (found[2, 0].error or "")
            assert all(found[3, index].is_complete for index in range(4))
            check(await rolled_out(rollout))  # the fleet is free for the next run

    asyncio.run(scenario())


def test_tools_that_swallow_their_cancellation_or_exit_end_their_own_response_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_calls, "ENDING_S", 0.05)

    async def environment(conversation: Conversation) -> Answer:
        while conversation.group == 0:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        if conversation.group == 1:
            sys.exit(2)
        return await three_turns(conversation)

    async def scenario() -> None:
        async with a_rollout() as rollout:
            found = await rolled_out(rollout, environment, environment_deadline_s=0.05)
            for index in range(4):
                assert "turn 1 took longer than 0.05 s" in (found[0, index].error or "")
                assert "turn 1: SystemExit: 2" in (found[1, index].error or "")
                assert found[2, index].is_complete
            assert rollout.current is not None
            assert rollout.current.num_abandoned_calls == 4
            assert fleet_sample(rollout.fleet).num_abandoned_calls >= 4
            async with rollout.session() as session:
                [failed] = session.submit(
                    PROMPTS[0], sampling=SAMPLING, environment=environment, environment_deadline_s=0.05
                )
                assert "took longer than 0.05 s" in ((await failed).error or "")

    asyncio.run(scenario())


def test_tools_that_hang_in_asyncios_own_threads_do_not_keep_a_rollout_from_closing() -> None:
    let_go, num_hanging = threading.Event(), 40  # more than asyncio has threads, on any machine

    async def environment(conversation: Conversation) -> Answer:
        await asyncio.gather(*(asyncio.to_thread(let_go.wait) for _ in range(num_hanging)))
        return None

    async def scenario() -> None:
        try:
            async with asyncio.timeout(60), a_rollout() as rollout:
                found = await rolled_out(rollout, environment, environment_deadline_s=0.2)
                assert {response.finish_reason for response in found.values()} == {FinishReason.FAILED}
        finally:
            let_go.set()  # `asyncio.run` waits for them

    asyncio.run(scenario())


def test_hundreds_of_tools_wait_at_once_and_hold_no_instance() -> None:
    waiting = 0
    all_wait = asyncio.Event()

    async def environment(conversation: Conversation) -> Answer:
        nonlocal waiting
        waiting += 1
        if waiting == 400:
            all_wait.set()
        await all_wait.wait()
        return End(reward=1.0)

    async def scenario() -> None:
        async with a_rollout(instances=1) as rollout:
            prompts = [[1, 2, i] for i in range(100)]
            groups = [g async for g in rollout.run(prompts, n=4, sampling=SAMPLING, environment=environment)]
            assert sum(r.reward or 0.0 for group in groups for r in group.responses) == 400.0

    asyncio.run(scenario())


def test_an_answer_that_does_not_fit_ends_the_response_by_its_length_with_a_reward() -> None:
    async def environment(conversation: Conversation) -> Answer:
        if conversation.finish_reason is FinishReason.LENGTH:
            return End(reward=-1.0)
        return Reply(token_ids=[5] * (conversation.room_tokens + 1))

    async def scenario() -> None:
        async with a_rollout() as rollout:
            found = await rolled_out(rollout, environment, max_context_tokens=80)
            for response in found.values():
                assert (response.finish_reason, response.reward) == (FinishReason.LENGTH, -1.0)
                assert response.num_given_tokens == 0

    asyncio.run(scenario())


def test_the_first_turn_ends_where_the_context_does_and_a_prompt_that_fills_it_is_refused() -> None:
    async def one_turn(conversation: Conversation) -> Answer:
        return End(reward=1.0)

    async def scenario() -> None:
        async with a_rollout() as rollout:
            longest = max(map(len, PROMPTS))
            found = await rolled_out(rollout, one_turn, max_context_tokens=longest + 3)
            for response in found.values():
                room = longest + 3 - response.num_prompt_tokens
                assert len(response.token_ids) <= room
                assert response.finish_reason is FinishReason.STOP or len(response.token_ids) == room
            assert any(response.finish_reason is FinishReason.LENGTH for response in found.values())
            with pytest.raises(InputError, match=f"may have max_context_tokens={longest}"):
                await rolled_out(rollout, one_turn, max_context_tokens=longest)
            late = rollout.run(iter(PROMPTS), enough_groups=9, environment=one_turn, max_context_tokens=longest)
            with pytest.raises(InputError, match="max_context_tokens"):
                [group async for group in late]
            async with rollout.session() as session:
                with pytest.raises(InputError, match="max_context_tokens"):
                    session.submit(PROMPTS[0], environment=one_turn, max_context_tokens=1)
                [handle] = session.submit([1, 2], environment=one_turn, sampling=SAMPLING, max_context_tokens=5)
                assert len((await handle).token_ids) <= 3

    asyncio.run(scenario())


def test_cancelling_a_run_ends_waits_and_leaving_it_does_too() -> None:
    async def never(conversation: Conversation) -> Answer:
        await asyncio.Event().wait()
        return None

    async def scenario() -> None:
        async with a_rollout() as rollout:
            asked = 0

            def cancel_at_eight(event: Event) -> None:
                nonlocal asked
                asked += isinstance(event, Asked)
                if asked == 8 and not isinstance(event, Ended):
                    asyncio.get_running_loop().call_soon(rollout.cancel)

            found = await rolled_out(rollout, never, events=cancel_at_eight)
            assert {response.finish_reason for response in found.values()} == {FinishReason.CANCELLED}
            check(await rolled_out(rollout))

    asyncio.run(scenario())


def test_a_killed_run_goes_on_with_its_journal_where_each_conversation_was(tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    async def scenario() -> None:
        async with a_rollout(step_s=0.001) as rollout:
            asked = 0

            def stop_soon(event: Event) -> None:
                nonlocal asked
                asked += isinstance(event, Asked)
                if asked == 12:
                    raise OSError("the disk is full")

            with pytest.raises(OSError, match="disk"):
                await rolled_out(rollout, events=stop_soon, journal=journal)
            size = journal.stat().st_size
            calls: list[tuple[Key, int]] = []

            async def counting(conversation: Conversation) -> Answer:
                calls.append((conversation.key, conversation.turn))
                return await three_turns(conversation)

            check(await rolled_out(rollout, counting, events=discard, journal=journal, resume=True))
            assert len(calls) == len(set(calls)) < 16 * 3
            assert journal.stat().st_size > size
            # Resumed when all is over, nothing is asked again, and rewards are known.
            calls.clear()
            check(await rolled_out(rollout, counting, journal=journal, resume=True))
            assert not calls

    asyncio.run(scenario())


def test_sessions_have_environments_per_submission() -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout, rollout.session() as session:
            talking = session.submit(PROMPTS[0], n=3, sampling=SAMPLING, seed=3, environment=three_turns)
            plain = session.submit(PROMPTS[0], n=3, sampling=SAMPLING, seed=3)
            for handle in talking:
                response = await handle
                assert (response.token_ids, response.loss_mask) == expected(response.seed)
            for handle, other in zip(plain, talking, strict=True):
                response, first_turn = await handle, (await other).turns[0]
                assert response.loss_mask is None
                assert response.token_ids == (await other).token_ids[: first_turn.end]

    asyncio.run(scenario())


def test_what_is_no_async_function_is_refused_before_anything_starts() -> None:
    async def scenario() -> None:
        async with a_rollout() as rollout:
            for bad in (lambda conversation: None, 3, object()):
                with pytest.raises(ConfigError, match="not an async function") as refused:
                    await rolled_out(rollout, bad)
                assert "seer.in_thread" in (refused.value.hint or "")
            with pytest.raises(ConfigError, match="lengths"):
                await rolled_out(rollout, lengths=[[3] * 4] * 4)
            with pytest.raises(ConfigError, match="tools"):
                await rolled_out(rollout, tools=["calculator"])

    asyncio.run(scenario())
