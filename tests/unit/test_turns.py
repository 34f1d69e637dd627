# SPDX-License-Identifier: Apache-2.0
"""Requests with turns in the buffer and the loop: handed over, answered, ended, with the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from builders import a_buffer
from seer.buffer import Request, RequestState
from seer.context import Context
from seer.engine.fake import END_TOKEN, FakeInstance, fake_stop, fake_token
from seer.metrics.events import Answered, Asked, Ended, Event
from seer.rollout import RolloutLoop
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.types import ChunkEnd, ChunkOutput, FinishReason, Group, Response, Restored, Sampling, TokenSpan

MAX_TOKENS, MAX_CONTEXT = 60, 120
Environment = Callable[[RolloutLoop, Request], None]
Past = Mapping[tuple[int, int], Restored]


def a_group(id: int = 0, size: int = 3, *, max_context_tokens: int = MAX_CONTEXT) -> Group:
    return Group(
        id=id,
        num_requests=size,
        num_prompt_tokens=2,
        sampling=Sampling(max_tokens=MAX_TOKENS),
        prompt=[1, 2],
        seed=id,
        has_turns=True,
        max_context_tokens=max_context_tokens,
    )


def answer_until(num_turns: int, *, tokens: int = 5) -> Environment:
    """Gives tokens after each turn but the last one, which has a reward; a request out of room is concluded."""

    def environment(loop: RolloutLoop, request: Request) -> None:
        if request.num_turns == num_turns or loop.buffer.room_tokens(request) < tokens:
            loop.conclude(request, float(request.num_turns))
        else:
            loop.answer(request, [700 + request.num_turns] * tokens)

    return environment


async def rolled_out(
    environment: Environment,
    *groups: Group,
    scheduler: str = "seer",
    restored: Past | None = None,
    events: list[Event] | None = None,
) -> dict[tuple[int, int], Response]:
    context = Context()
    instances = [FakeInstance(i) for i in range(2)]
    chosen = make_scheduler(parse_scheduler(scheduler), SchedulerSettings(chunk_tokens=8), context, lambda r: 0)

    def on_turn(request: Request) -> None:
        assert loop.fleet.in_flight[0] + loop.fleet.in_flight[1] == loop.buffer.num_in_flight
        asyncio.get_running_loop().call_soon(environment, loop, request)

    loop = RolloutLoop(
        instances, chosen, context, on_turn=on_turn, events=events.append if events is not None else lambda event: None
    )
    for instance in instances:
        await instance.start(loop.on_output)
    found = {}
    async for result in loop.run(groups or (a_group(0), a_group(1)), restored=restored):
        found.update({(r.group, r.index): r for r in result.responses})
        loop.buffer.check()
    assert not any(loop.fleet.in_flight)
    return found


def expected_tokens(seed: int, num_turns: int, tokens: int = 5) -> tuple[list[int], list[int]]:
    """What the fake generates and `answer_until` gives, without a loop: tokens and mask."""
    ids: list[int] = []
    mask: list[int] = []
    generated = 0
    for turn in range(1, num_turns + 1):
        stop = fake_stop(seed, MAX_TOKENS, generated)
        ids += [fake_token(seed, len(ids) + i) for i in range(stop - generated - 1)] + [END_TOKEN]
        mask += [1] * (stop - generated)
        generated = stop
        if generated == MAX_TOKENS or turn == num_turns:
            break
        ids, mask = ids + [700 + turn] * tokens, mask + [0] * tokens
    return ids, mask


@pytest.mark.parametrize("scheduler", ["verl", "divided", "context", "seer"])
def test_given_tokens_are_between_generated_ones_and_masked(scheduler: str) -> None:
    for response in asyncio.run(rolled_out(answer_until(3), scheduler=scheduler)).values():
        ids, mask = expected_tokens(response.seed, 3)
        assert (response.token_ids, response.loss_mask) == (ids, mask)
        assert (response.num_tokens, response.num_given_tokens) == (sum(mask), len(mask) - sum(mask))
        assert all((value == 0.0) == (kept == 0) for value, kept in zip(response.logprobs, mask, strict=True))
        assert response.reward == sum(turn.kind == "generated" for turn in response.turns)


def test_turns_alternate_cover_all_tokens_and_have_their_times() -> None:
    for response in asyncio.run(rolled_out(answer_until(3))).values():
        kinds = [turn.kind for turn in response.turns]
        assert kinds == ["generated", "given"] * (len(kinds) // 2)
        assert [turn.start for turn in response.turns[1:]] == [turn.end for turn in response.turns[:-1]]
        assert (response.turns[0].start, response.turns[-1].end) == (0, len(response.token_ids))
        assert response.turns[-1].start == response.turns[-1].end  # the environment's last answer has no tokens
        times = [time for turn in response.turns for time in (turn.began_s, turn.ended_s)]
        assert None not in times
        assert times == sorted(times, key=lambda time: time or 0.0)


def test_events_show_when_a_request_waits_for_its_tool() -> None:
    events: list[Event] = []
    asyncio.run(rolled_out(answer_until(2), a_group(size=1), events=events))
    kinds = [type(event).__name__ for event in events if isinstance(event, Asked | Answered | Ended)]
    assert kinds == ["Asked", "Answered", "Asked", "Ended"]
    assert [event.turn for event in events if isinstance(event, Asked)] == [1, 2]


def test_an_environment_that_fails_ends_its_response_and_no_other() -> None:
    def environment(loop: RolloutLoop, request: Request) -> None:
        if (request.group.id, request.index) == (0, 1):
            loop.fail_at_tool(request, "the tool is broken")
        else:
            answer_until(2)(loop, request)

    found = asyncio.run(rolled_out(environment))
    failed = found.pop((0, 1))
    assert (failed.finish_reason, failed.error) == (FinishReason.FAILED, "the tool is broken")
    assert failed.token_ids
    assert all(response.is_complete for response in found.values())


def test_a_response_whose_context_is_full_ends_by_its_length() -> None:
    def environment(loop: RolloutLoop, request: Request) -> None:
        room = loop.buffer.room_tokens(request)
        if room:
            loop.answer(request, [7] * room)
        else:
            loop.conclude(request, 0.5)

    for response in asyncio.run(rolled_out(environment, a_group(max_context_tokens=70))).values():
        assert response.num_prompt_tokens + len(response.token_ids) <= 70
        assert (response.finish_reason, response.reward) == (FinishReason.LENGTH, 0.5)


def test_cancelling_ends_requests_at_their_tools_at_once() -> None:
    async def scenario() -> None:
        context = Context()
        instance = FakeInstance(0)
        chosen = make_scheduler(parse_scheduler("seer"), SchedulerSettings(chunk_tokens=8), context, lambda r: 0)
        waiting: list[Request] = []

        def on_turn(request: Request) -> None:
            waiting.append(request)
            if len(waiting) == 3:
                loop.cancel()

        loop = RolloutLoop([instance], chosen, context, on_turn=on_turn)
        await instance.start(loop.on_output)
        async for result in loop.run([a_group()]):
            assert {r.finish_reason for r in result.responses} == {FinishReason.CANCELLED}
            assert all(response.token_ids for response in result.responses)

    asyncio.run(scenario())


def test_a_resumed_run_asks_the_environment_that_was_to_be_asked_and_repeats_nothing() -> None:
    whole = asyncio.run(rolled_out(answer_until(3), a_group()))
    past: dict[tuple[int, int], Restored] = {}
    for (group, index), response in whole.items():
        first, second = response.turns[0].end, response.turns[1].end
        ids = response.token_ids
        spans = [TokenSpan(ids[:first], response.logprobs[:first], 0)]
        if index > 0:
            spans.append(TokenSpan(ids[first:second], (), 0, is_given=True))
        past[group, index] = Restored(tuple(spans), has_handed_over=index == 0)
    last = whole[0, 2]
    spans = [
        TokenSpan(last.token_ids[t.start : t.end], last.logprobs[t.start : t.end], 0)
        if t.kind == "generated"
        else TokenSpan(last.token_ids[t.start : t.end], (), 0, is_given=True)
        for t in last.turns
        if t.end > t.start
    ]
    past[0, 2] = Restored(tuple(spans), last.finish_reason, reward=last.reward)
    again = asyncio.run(rolled_out(answer_until(3), a_group(), restored=past))
    for key, response in whole.items():
        assert again[key].token_ids == response.token_ids
        assert again[key].loss_mask == response.loss_mask
        assert (again[key].reward, again[key].finish_reason) == (response.reward, response.finish_reason)
        assert [(t.kind, t.start, t.end) for t in again[key].turns] == [
            (t.kind, t.start, t.end) for t in response.turns
        ]
    assert again[0, 2].num_chunks == 0


def test_a_request_at_its_tool_holds_no_lease_and_no_move_but_the_environments_is_legal() -> None:
    buffer = a_buffer(a_group(size=1))
    request = buffer[0]
    chunk = buffer.start(request, 0, 30, False, 1.0)
    buffer.apply(ChunkOutput(0, chunk.attempt, 0, 3, end=ChunkEnd.STOP), 2.0)
    assert request.state is RequestState.AT_TOOL
    assert (buffer.num_at_tool, buffer.num_in_flight, request.lease_tokens, request.instance) == (1, 0, 0, None)
    assert buffer.room_tokens(request) == MAX_CONTEXT - 2 - 3 - 1
    with pytest.raises(AssertionError, match="at its tool"):
        buffer.start(request, 0, 10, False, 2.0)
    with pytest.raises(AssertionError, match="given to"):
        buffer.answer(request, None, MAX_CONTEXT, 2.0)
    buffer.answer(request, None, 4, 3.0)
    buffer.check()
    assert (request.num_tokens, request.num_fresh, request.remaining_limit) == (9, 4, MAX_TOKENS - 3)
    assert buffer.start(request, 1, 5, True, 4.0).num_context_tokens == 9
