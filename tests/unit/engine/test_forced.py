# SPDX-License-Identifier: Apache-2.0
import asyncio

from msgspec.structs import replace

from seer.engine.fake import FakeInstance
from seer.engine.forced import ForcedLengths
from seer.types import Chunk, ChunkEnd, ChunkOutput, Sampling, TokenSpan

CHUNK = Chunk(
    request=0,
    group=0,
    attempt=1,
    num_prompt_tokens=1,
    num_generated_tokens=0,
    max_tokens=10,
    sampling=Sampling(max_tokens=100),
    seed=3,
    weights_version=0,
    prompt=[1],
)


def outputs_at(length: int, *chunks: Chunk) -> list[ChunkOutput]:
    outputs: list[ChunkOutput] = []

    async def play() -> None:
        ended = asyncio.Event()

        def take(output: ChunkOutput) -> None:
            outputs.append(output)
            if output.end is not None:
                ended.set()

        forced = ForcedLengths(FakeInstance(0), lambda request: length)
        await forced.start(take)
        for chunk in chunks:
            ended.clear()
            forced.submit(chunk)
            await ended.wait()
        await forced.close()

    asyncio.run(play())
    return outputs


def test_a_response_stops_at_its_length_whatever_the_model_says() -> None:
    outputs = outputs_at(7, CHUNK)
    assert sum(o.num_tokens for o in outputs) == 7
    assert outputs[-1].end is ChunkEnd.STOP


def test_a_chunk_before_the_end_reaches_its_limit_as_usual() -> None:
    spans = (TokenSpan([1] * 10, [-1.0] * 10, 0),)
    second = replace(CHUNK, attempt=2, num_generated_tokens=10, spans=spans)
    outputs = outputs_at(15, CHUNK, second)
    assert [o.end for o in outputs if o.end] == [ChunkEnd.LIMIT, ChunkEnd.STOP]
    assert sum(o.num_tokens for o in outputs) == 15


def test_a_length_at_the_chunk_s_own_limit_is_a_stop() -> None:
    assert outputs_at(10, CHUNK)[-1].end is ChunkEnd.STOP


def test_an_aborted_last_chunk_does_not_count_as_a_stop_and_its_next_attempt_does() -> None:
    ends: list[ChunkEnd | None] = []

    async def play() -> None:
        forced = ForcedLengths(FakeInstance(0), lambda request: 5)
        stopped = asyncio.Event()

        def take(output: ChunkOutput) -> None:
            if output.end is not None:
                ends.append(output.end)
            if output.end is ChunkEnd.STOP:
                stopped.set()

        await forced.start(take)
        forced.submit(CHUNK)
        forced.abort(0)
        forced.submit(replace(CHUNK, attempt=2))
        await stopped.wait()
        await forced.close()

    asyncio.run(play())
    assert ends == [ChunkEnd.ABORTED, ChunkEnd.STOP]
