# SPDX-License-Identifier: Apache-2.0
"""The rollout loop over instances whose every move the test decides."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from builders import a_group, a_scheduler, a_workload, limits, roll_out
from seer.context import Context
from seer.engine.base import InstanceView, OutputSink, Weights
from seer.errors import ConfigError, DeadlineExceeded, InstanceError
from seer.metrics.events import Ended, Event, Stopped
from seer.rollout import RolloutLoop
from seer.scheduling.base import Renewal
from seer.sim import virtual_time
from seer.types import Attempt, Chunk, ChunkEnd, ChunkOutput, FinishReason, Group, GroupResult, Lease


class ScriptedInstance:
    """Answers each chunk, a second later, with what `answer` makes of it; None leaves it running."""

    def __init__(self, id: int, answer: Callable[[Chunk], ChunkOutput | None]) -> None:
        self._id = id
        self._answer = answer
        self._sink: OutputSink | None = None
        self.chunks: list[Chunk] = []
        self.aborted: list[int] = []

    @property
    def id(self) -> int:
        return self._id

    limits = limits()

    async def start(self, sink: OutputSink) -> None:
        self._sink = sink

    def submit(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        output = self._answer(chunk)
        if output is not None:
            asyncio.get_running_loop().call_later(1.0, self.emit, output)

    def emit(self, output: ChunkOutput) -> None:
        assert self._sink is not None
        self._sink(output)

    def abort(self, request: int) -> None:
        self.aborted.append(request)
        chunk = next(chunk for chunk in reversed(self.chunks) if chunk.request == request)
        last = ChunkOutput(request, chunk.attempt, self._id, 3, end=ChunkEnd.ABORTED)
        asyncio.get_running_loop().call_later(1.0, self.emit, last)

    def extend(self, leases: Sequence[Lease]) -> None:
        """Answers are scripted: leases change nothing."""

    def park(self, attempts: Sequence[Attempt]) -> None:
        """Answers are scripted: a park changes nothing."""

    def view(self) -> InstanceView:
        return InstanceView()

    def cached_prefix_tokens(self, chunk: Chunk) -> int:
        return 0

    async def update_weights(self, weights: Weights, weights_version: int) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


def stops(chunk: Chunk) -> ChunkOutput:
    return ChunkOutput(chunk.request, chunk.attempt, 0, 7, end=ChunkEnd.STOP)


def fails(chunk: Chunk) -> ChunkOutput:
    return ChunkOutput(chunk.request, chunk.attempt, 0, 0, end=ChunkEnd.FAILED, error="out of luck")


def hangs(chunk: Chunk) -> None:
    return None


def roll(
    instances: list[ScriptedInstance],
    groups: list[Group],
    *,
    scheduler: str = "divided",
    during_run: Callable[[RolloutLoop], Awaitable[None]] | None = None,
    events: list[Event] | None = None,
    stall_deadline_s: float | None = None,
    enough_groups: int | None = None,
) -> list[GroupResult]:
    async def main() -> list[GroupResult]:
        context = Context()
        loop = RolloutLoop(
            instances,
            a_scheduler(scheduler, chunk_tokens=100, context=context),
            context,
            events=(events if events is not None else []).append,
            stall_deadline_s=stall_deadline_s,
        )
        for instance in instances:
            await instance.start(loop.on_output)
        task = asyncio.ensure_future(during_run(loop)) if during_run is not None else None
        results = [result async for result in loop.run(groups, enough_groups=enough_groups)]
        if task is not None:
            await task
        loop.buffer.check()
        loop.fleet.check()
        return results

    return virtual_time.run(main())


def test_groups_are_handed_out_as_they_complete() -> None:
    slow = {0, 1}

    def answer(chunk: Chunk) -> ChunkOutput | None:
        output = stops(chunk)
        if chunk.request in slow:
            asyncio.get_running_loop().call_later(50.0, instance.emit, output)
            return None
        return output

    instance = ScriptedInstance(0, answer)
    results = roll([instance], [a_group(0, 2), a_group(1, 2)])
    assert [result.group for result in results] == [1, 0]
    assert [response.finished_s for response in results[0].responses] == [1.0, 1.0]


def test_a_request_goes_on_in_chunks_until_its_own_limit() -> None:
    def runs_to_the_limit(chunk: Chunk) -> ChunkOutput:
        return ChunkOutput(chunk.request, chunk.attempt, 0, chunk.max_tokens, end=ChunkEnd.LIMIT)

    instance = ScriptedInstance(0, runs_to_the_limit)
    (result,) = roll([instance], [a_group(0, 1, max_tokens=250)])
    assert [chunk.max_tokens for chunk in instance.chunks] == [100, 100, 50]
    assert [chunk.num_generated_tokens for chunk in instance.chunks] == [0, 100, 200]
    assert (result.responses[0].finish_reason, result.responses[0].num_tokens) == (FinishReason.LENGTH, 250)


def test_a_request_that_fails_too_often_ends_with_its_error() -> None:
    instance = ScriptedInstance(0, fails)
    (result,) = roll([instance], [a_group(0, 1)])
    assert len(instance.chunks) == 3
    assert (result.responses[0].finish_reason, result.responses[0].error) == (FinishReason.FAILED, "out of luck")


def test_a_refused_submit_counts_as_a_failure_and_is_tried_again() -> None:
    class Refusing(ScriptedInstance):
        def submit(self, chunk: Chunk) -> None:
            if not self.chunks:
                self.chunks.append(chunk)
                raise InstanceError("busy")
            super().submit(chunk)

    instance = Refusing(0, stops)
    (result,) = roll([instance], [a_group(0, 1)])
    assert (result.responses[0].finish_reason, result.responses[0].num_chunks) == (FinishReason.STOP, 2)


def test_cancelled_requests_return_the_tokens_that_were_still_on_their_way() -> None:
    instance = ScriptedInstance(0, hangs)

    async def cancel_later(loop: RolloutLoop) -> None:
        await asyncio.sleep(5)
        loop.cancel()

    events: list[Event] = []
    (result,) = roll([instance], [a_group(0, 3)], during_run=cancel_later, events=events)
    assert [(r.finish_reason, r.num_tokens) for r in result.responses] == [(FinishReason.CANCELLED, 3)] * 3
    assert instance.aborted == [0, 1, 2]
    assert [event.reason for event in events if isinstance(event, Stopped)] == ["aborted"] * 3


def test_enough_whole_groups_cancel_the_rest_even_if_several_complete_at_once() -> None:
    def answer(chunk: Chunk) -> ChunkOutput | None:
        return stops(chunk) if chunk.group < 3 else None

    results = roll([ScriptedInstance(0, answer)], [a_group(id, 2) for id in range(5)], enough_groups=2)
    reasons = {result.group: {response.finish_reason for response in result.responses} for result in results}
    stopped, cancelled = {FinishReason.STOP}, {FinishReason.CANCELLED}
    assert reasons == {0: stopped, 1: stopped, 2: stopped, 3: cancelled, 4: cancelled}


def test_a_lost_instances_requests_run_elsewhere_and_late_outputs_are_ignored() -> None:
    dead, alive = ScriptedInstance(0, hangs), ScriptedInstance(1, stops)

    async def lose(loop: RolloutLoop) -> None:
        await asyncio.sleep(5)
        loop.lose_instance(0)
        dead.emit(stops(dead.chunks[0]))

    (result,) = roll([dead, alive], [a_group(0, 4)], scheduler="verl", during_run=lose)
    assert [response.num_tokens for response in result.responses] == [7] * 4
    assert len(dead.chunks) == 2
    assert len(alive.chunks) == 4


def test_with_no_instance_left_it_waits_for_one_to_come_back() -> None:
    instance = ScriptedInstance(0, hangs)

    async def lose_and_rejoin(loop: RolloutLoop) -> None:
        await asyncio.sleep(5)
        loop.lose_instance(0)
        instance._answer = stops
        await asyncio.sleep(5)
        loop.rejoin_instance(0)

    (result,) = roll([instance], [a_group(0, 2)], during_run=lose_and_rejoin)
    assert [response.finished_s for response in result.responses] == [11.0, 11.0]


def test_an_instance_that_comes_back_smaller_gets_what_fits_it_and_the_rest_fails_with_the_reason() -> None:
    moved = ScriptedInstance(0, hangs)

    async def move(loop: RolloutLoop) -> None:
        await asyncio.sleep(5)
        loop.lose_instance(0)
        moved._answer, moved.limits = stops, limits(20, max_num_seqs=1)
        loop.rejoin_instance(0)
        assert (loop.fleet.limits[0], loop.fleet.kv_tokens) == (limits(20, max_num_seqs=1), 20 * 64)

    groups = [a_group(0, 2, max_tokens=300), a_group(1, 2, max_tokens=3000)]
    results = {result.group: result.responses for result in roll([moved], groups, during_run=move)}
    assert [response.finish_reason for response in results[0]] == [FinishReason.STOP] * 2
    for response in results[1]:
        assert response.error == "it may grow to 3010 tokens; of the instances that are left, the largest holds 1280"


@pytest.mark.parametrize("scheduler", ["divided", "verl"])
def test_what_fits_only_instances_that_were_removed_is_refused_or_fails_and_never_waits(scheduler: str) -> None:
    """In flight on one that leaves, and waiting for it."""
    large, small = ScriptedInstance(0, hangs), ScriptedInstance(1, stops)
    large.limits, small.limits = limits(60, max_num_seqs=1), limits(1)
    parked: list[Attempt] = []
    large.park = parked.extend  # type: ignore[assignment, method-assign]

    async def remove(loop: RolloutLoop) -> None:
        await asyncio.sleep(5)
        loop.retire_instance(0)
        for one in parked:
            large.emit(ChunkOutput(one.request, one.attempt, 0, 3, end=ChunkEnd.PARKED))

    (result,) = roll([large, small], [a_group(0, 2, max_tokens=3000)], scheduler=scheduler, during_run=remove)
    assert {response.finish_reason for response in result.responses} == {FinishReason.FAILED}
    assert all("the largest holds 64" in (response.error or "") for response in result.responses)


def test_cancelling_while_an_instance_is_lost_ends_its_requests() -> None:
    dead = ScriptedInstance(0, hangs)
    dead.abort = lambda request: None  # type: ignore[method-assign]

    async def cancel_and_lose(loop: RolloutLoop) -> None:
        await asyncio.sleep(5)
        loop.cancel()
        await asyncio.sleep(5)
        loop.lose_instance(0)

    (result,) = roll([dead], [a_group(0, 2)], during_run=cancel_and_lose)
    assert {response.finish_reason for response in result.responses} == {FinishReason.CANCELLED}


def test_silence_beyond_the_deadline_says_who_is_waited_for() -> None:
    with pytest.raises(DeadlineExceeded, match=r"2 requests in flight on instances \[0\]"):
        roll([ScriptedInstance(0, hangs)], [a_group(0, 2)], stall_deadline_s=60)


def test_a_group_larger_than_any_instance_is_refused_before_anything_starts() -> None:
    instance = ScriptedInstance(0, stops)
    with pytest.raises(ConfigError, match="an instance holds 6400"):
        roll([instance], [a_group(0, 1, max_tokens=100_000)])
    assert instance.chunks == []


def test_a_scheduler_that_starts_nothing_is_caught() -> None:
    class Lazy:
        def admit(self, *_: object) -> None: ...
        def requeue(self, *_: object) -> None: ...
        def finished(self, *_: object) -> None: ...
        def forget(self, *_: object) -> None: ...
        def away(self, *_: object) -> None: ...
        def renew(self, *_: object) -> Renewal:
            return Renewal()

        def next(self, fleet: object) -> None:
            return None

    async def main() -> None:
        loop = RolloutLoop([ScriptedInstance(0, stops)], Lazy(), Context())
        async for _ in loop.run([a_group()]):
            pass

    with pytest.raises(AssertionError, match="the scheduler starts none"):
        virtual_time.run(main())


def test_outputs_that_end_nothing_gather_and_an_end_brings_all_at_once() -> None:
    taken_s: list[float] = []

    async def play() -> None:
        clock, instance = asyncio.get_running_loop(), ScriptedInstance(0, hangs)
        scheduler = a_scheduler("verl")
        loop = RolloutLoop(
            [instance], scheduler, Context(), gather_s=10.0, on_tokens=lambda *_: taken_s.append(clock.time())
        )
        await instance.start(loop.on_output)
        for after_s, request, end in (
            (1.0, 0, None),
            (2.0, 0, None),
            (3.0, 0, ChunkEnd.STOP),
            (5.0, 1, None),
            (20.0, 1, ChunkEnd.STOP),
        ):
            clock.call_later(after_s, instance.emit, ChunkOutput(request, 1, 0, 1, end=end))
        async for _ in loop.run([a_group(0, 2)]):
            pass

    virtual_time.run(play())
    assert taken_s == [3.0, 3.0, 3.0, 15.0, 20.0]


def test_a_loop_that_starts_requests_in_pieces_rolls_out_the_same_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = a_workload([[30, 190, 60], [200, 150], [145]] * 4, instances=2, kv_tokens=256, chunk_tokens=64)
    whole = roll_out(workload, "seer")
    monkeypatch.setattr("seer.rollout.FILL_S", -1.0)
    monkeypatch.setattr("seer.rollout.FILL_STARTS", 1)
    pieces = roll_out(workload, "seer")
    assert ended_tokens(pieces.events) == ended_tokens(whole.events)


def ended_tokens(events: list[Event]) -> dict[int, int]:
    return {event.request: event.num_generated for event in events if isinstance(event, Ended)}
