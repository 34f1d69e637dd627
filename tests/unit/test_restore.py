# SPDX-License-Identifier: Apache-2.0
"""What an interrupted run had generated goes on counting in the next one."""

import asyncio

import pytest

from seer.buffer import RequestBuffer
from seer.context import Context
from seer.engine.fake import FakeInstance
from seer.metrics.events import Ended, Event, Queued, Started
from seer.rollout import RolloutLoop
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.types import FinishReason, Group, GroupResult, Restored, Sampling, TokenSpan


def a_group(id: int = 0, max_tokens: int = 60) -> Group:
    sampling = Sampling(max_tokens=max_tokens)
    return Group(id=id, num_requests=3, num_prompt_tokens=2, sampling=sampling, prompt=[1, 2], seed=id)


def a_span(*ids: int) -> TokenSpan:
    return TokenSpan(list(ids), [-1.0] * len(ids), 0)


def test_a_restored_request_has_its_tokens_and_may_have_ended() -> None:
    buffer = RequestBuffer()
    first, second, _ = buffer.admit([a_group()], 0.0)
    buffer.restore(first, Restored((a_span(1, 2), a_span(3))), 0.0)
    buffer.restore(second, Restored((a_span(4),), FinishReason.STOP), 0.0)
    buffer.check()
    assert (first.num_generated, first.remaining_limit, first.ended) == (3, 57, False)
    assert (second.finish_reason, buffer.num_ended, buffer.num_waiting) == (FinishReason.STOP, 1, 2)
    chunk = buffer.start(first, 0, 10, False, 0.0)
    assert chunk.token_ids() == [1, 2, 1, 2, 3]
    with pytest.raises(AssertionError):
        buffer.restore(first, Restored(()), 0.0)


def rolled_out(scheduler: str, restored: dict[tuple[int, int], Restored]) -> tuple[list[GroupResult], list[Event]]:
    events: list[Event] = []

    async def scenario() -> list[GroupResult]:
        context = Context()
        instances = [FakeInstance(i) for i in range(2)]
        chosen = make_scheduler(
            parse_scheduler(scheduler), SchedulerSettings(chunk_tokens=8), context, lambda request: 0
        )
        loop = RolloutLoop(instances, chosen, context, events=events.append)
        for instance in instances:
            await instance.start(loop.on_output)
        return [group async for group in loop.run([a_group(0), a_group(1)], restored=restored)]

    return asyncio.run(scenario()), events


@pytest.mark.parametrize("scheduler", ["verl-sync", "verl", "divided", "context", "seer"])
def test_a_restored_run_gives_the_same_and_repeats_nothing(scheduler: str) -> None:
    whole, _ = rolled_out(scheduler, {})
    responses = {(r.group, r.index): r for group in whole for r in group.responses}
    half = {key: Restored((a_span(*r.token_ids[: r.num_tokens // 2]),)) for key, r in responses.items()}
    half[(0, 0)] = Restored((a_span(*responses[(0, 0)].token_ids),), responses[(0, 0)].finish_reason)
    again, events = rolled_out(scheduler, half)
    assert {(r.group, r.index): r.token_ids for g in again for r in g.responses} == {
        key: response.token_ids for key, response in responses.items()
    }
    assert not any(isinstance(event, Started) and event.request == 0 for event in events)
    assert sum(isinstance(event, Ended) for event in events) == 6
    queued = [event.num_generated for event in events if isinstance(event, Queued)]
    assert queued == [len(half[divmod(request, 3)].spans[0].ids) for request in range(6)]


def test_a_run_that_had_finished_is_handed_out_at_once() -> None:
    whole, _ = rolled_out("seer", {})
    done = {(r.group, r.index): Restored((a_span(*r.token_ids),), r.finish_reason) for g in whole for r in g.responses}
    again, events = rolled_out("seer", done)
    assert len(again) == 2
    assert not any(isinstance(event, Started) for event in events)
