# SPDX-License-Identifier: Apache-2.0
import asyncio

from seer.hosting.outbox import Outbox, merge
from seer.metrics.events import Decoding, Event
from seer.types import ChunkEnd, ChunkOutput, TokenSpan


def an_output(
    request: int, *ids: int, attempt: int = 1, weights_version: int = 0, end: ChunkEnd | None = None
) -> ChunkOutput:
    span = TokenSpan(list(ids), [-1.0] * len(ids), weights_version, [-2.0] * len(ids))
    return ChunkOutput(request, attempt, 0, len(ids), span, end, num_drafted=2, num_accepted=1)


def test_successive_outputs_become_one() -> None:
    merged = merge(an_output(1, 5, 6), an_output(1, 7, end=ChunkEnd.STOP))
    assert merged is not None
    assert merged.span is not None
    assert list(merged.span.ids) == [5, 6, 7]
    assert len(merged.span.raw_logprobs or ()) == 3
    assert (merged.num_tokens, merged.end) == (3, ChunkEnd.STOP)
    assert (merged.num_drafted, merged.num_accepted) == (4, 2)


def test_outputs_without_log_probabilities_become_one_without() -> None:
    first, second = (ChunkOutput(1, 1, 0, 1, TokenSpan([token], [], 0)) for token in (5, 6))
    assert merge(first, second) == ChunkOutput(1, 1, 0, 2, TokenSpan([5, 6], [], 0))


def test_an_end_without_tokens_keeps_the_tokens_before_it() -> None:
    merged = merge(an_output(1, 5), ChunkOutput(1, 1, 0, 0, end=ChunkEnd.ABORTED))
    assert merged is not None
    assert merged.span is not None
    assert list(merged.span.ids) == [5]
    assert merged.end is ChunkEnd.ABORTED


def test_attempts_weights_versions_and_ended_chunks_stay_apart() -> None:
    assert merge(an_output(1, 5), an_output(1, 6, attempt=2)) is None
    assert merge(an_output(1, 5), an_output(1, 6, weights_version=1)) is None
    assert merge(an_output(1, 5, end=ChunkEnd.LIMIT), an_output(1, 6)) is None
    assert merge(an_output(1, 5), an_output(2, 6)) is None


def sent_by(*actions: object, flush_tokens: int = 100) -> list[tuple[list[ChunkOutput], list[Event]]]:
    sent: list[tuple[list[ChunkOutput], list[Event]]] = []

    async def play() -> None:
        outbox = Outbox(lambda outputs, events: sent.append((outputs, events)), flush_s=3600, flush_tokens=flush_tokens)
        for action in actions:
            if isinstance(action, ChunkOutput):
                outbox.put(action)
            else:
                outbox.put_event(action)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(play())
    return sent


def test_tokens_wait_for_others_and_an_end_sends_everything() -> None:
    assert sent_by(an_output(1, 5), an_output(2, 6)) == []
    ((outputs, _),) = sent_by(an_output(1, 5), an_output(2, 6), an_output(1, 7, end=ChunkEnd.STOP))
    assert [(o.request, o.num_tokens, o.end) for o in outputs] == [(1, 2, ChunkEnd.STOP), (2, 1, None)]


def test_enough_tokens_of_one_request_go_at_once() -> None:
    ((outputs, _),) = sent_by(an_output(1, 5, 6), an_output(1, 7, 8), flush_tokens=4)
    assert [o.num_tokens for o in outputs] == [4]


def test_full_outputs_gather_and_an_end_does_not_wait_for_them() -> None:
    sent: list[list[int]] = []

    async def play() -> None:
        outbox = Outbox(lambda outputs, _: sent.append([o.request for o in outputs]), flush_s=3600, flush_tokens=1)
        outbox.put(an_output(1, 5))
        await asyncio.sleep(0)
        outbox.put(an_output(1, 6))
        outbox.put(an_output(2, 7))
        await asyncio.sleep(0)
        assert sent == [[1]], "the second frame waits for more"
        outbox.put(an_output(3, 8, end=ChunkEnd.STOP))
        await asyncio.sleep(0)

    asyncio.run(play())
    assert sent == [[1], [1, 2, 3]]


def test_full_outputs_leave_without_a_further_output() -> None:
    async def play() -> None:
        frames: asyncio.Queue[int] = asyncio.Queue()
        outbox = Outbox(lambda outputs, _: frames.put_nowait(len(outputs)), flush_s=3600, flush_tokens=1)
        for _ in range(2):
            outbox.put(an_output(1, 5))
            assert await asyncio.wait_for(frames.get(), 60) == 1

    asyncio.run(play())


def test_events_leave_with_the_next_batch() -> None:
    event = Decoding(0.0, 1, 0)
    ((outputs, events),) = sent_by(event, an_output(1, 5, end=ChunkEnd.STOP))
    assert events == [event]
    assert len(outputs) == 1
