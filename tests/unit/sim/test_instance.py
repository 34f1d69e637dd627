# SPDX-License-Identifier: Apache-2.0
"""The simulated instance: one chunk, one output; memory, prompts and KV as vLLM treats them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from builders import a_cost, limits
from seer.errors import InstanceError
from seer.metrics.events import Decoding, Event, InstanceState, Preempted, Prefilling
from seer.sim import virtual_time
from seer.sim.instance import SimulatedInstance
from seer.sim.speculation import SpeculationModel
from seer.types import LOW_LEASE_TOKENS, Chunk, ChunkEnd, ChunkOutput, Sampling


def a_chunk(
    request: int = 0,
    *,
    group: int | None = None,
    generated: int = 0,
    max_tokens: int = 1000,
    prompt: int = 50,
    load_kv: bool = False,
    attempt: int = 1,
    is_lease: bool = False,
) -> Chunk:
    return Chunk(
        request=request,
        group=request if group is None else group,
        attempt=attempt,
        num_prompt_tokens=prompt,
        num_generated_tokens=generated,
        max_tokens=max_tokens,
        sampling=Sampling(max_tokens=max_tokens + generated),
        seed=0,
        weights_version=0,
        load_kv=load_kv,
        is_lease=is_lease,
    )


Kind = TypeVar("Kind", bound=Event)


class Bench:
    """One instance, and its outputs with their times."""

    def __init__(self, lengths: dict[int, int], *, blocks: int = 100, speculation: bool = False) -> None:
        self.events: list[Event] = []
        self.outputs: list[tuple[float, ChunkOutput]] = []
        self._news = asyncio.Event()
        self.cost = a_cost(kv_tokens=64 * blocks)
        self.instance = SimulatedInstance(
            0,
            self.cost,
            limits(blocks),
            lengths.__getitem__,
            speculation=SpeculationModel(grouped=False) if speculation else None,
            events=self.events.append,
        )

    def run(self, script: Callable[[Bench], Awaitable[None]]) -> Bench:
        async def main() -> None:
            clock = asyncio.get_running_loop()

            def sink(output: ChunkOutput) -> None:
                self.outputs.append((clock.time(), output))
                self._news.set()

            await self.instance.start(sink)
            await script(self)
            await self.instance.close()

        virtual_time.run(main())
        return self

    async def finish(self, num_outputs: int) -> None:
        while len(self.outputs) < num_outputs:
            self._news.clear()
            await self._news.wait()

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]


def test_a_chunk_ends_with_the_response_or_at_its_limit() -> None:
    async def script(bench: Bench) -> None:
        bench.instance.submit(a_chunk(0, max_tokens=100))
        bench.instance.submit(a_chunk(1, max_tokens=100))
        await bench.finish(2)

    bench = Bench({0: 70, 1: 500}).run(script)
    ends = {output.request: (output.num_tokens, output.end) for _, output in bench.outputs}
    assert ends == {0: (70, ChunkEnd.STOP), 1: (100, ChunkEnd.LIMIT)}


def test_leases_that_run_low_are_reported_together_and_before_they_end() -> None:
    async def script(bench: Bench) -> None:
        for request, lease in enumerate([100, 99, 98]):
            bench.instance.submit(a_chunk(request, max_tokens=lease, is_lease=True))
        await bench.finish(6)

    bench = Bench({0: 500, 1: 500, 2: 500}).run(script)
    reports, ends = bench.outputs[:3], bench.outputs[3:]
    assert len({at_s for at_s, _ in reports}) == 1
    left = {
        output.request: lease - output.num_tokens for (_, output), lease in zip(reports, [100, 99, 98], strict=True)
    }
    assert all(0 < tokens <= LOW_LEASE_TOKENS for tokens in left.values())
    assert [output.end for _, output in reports] == [None] * 3
    assert {output.request: (output.num_tokens, output.end) for _, output in ends} == {
        request: (tokens, ChunkEnd.LIMIT) for request, tokens in left.items()
    }


def test_time_is_what_the_cost_model_says() -> None:
    async def script(bench: Bench) -> None:
        bench.instance.submit(a_chunk(0, prompt=64))
        await bench.finish(1)

    bench = Bench({0: 200}).run(script)
    prefill = bench.cost.step(0, 1.0, 64)
    decode = bench.cost.step(1)
    # Continuous steps: the context grows along a line from 64 to 264 tokens.
    expected_s = prefill.base_s + 200 * decode.base_s + decode.per_context_token_s * (64 * 200 + 200 * 200 / 2)
    assert bench.outputs[0][0] == pytest.approx(expected_s, rel=1e-9)


def test_siblings_share_their_prompt() -> None:
    async def script(bench: Bench) -> None:
        bench.instance.submit(a_chunk(0, group=7, prompt=500))
        await asyncio.sleep(1.0)
        bench.instance.submit(a_chunk(1, group=7, prompt=500))
        await bench.finish(2)

    bench = Bench({0: 900, 1: 900}).run(script)
    assert [event.num_tokens for event in bench.of(Prefilling)] == [500, 0]
    peak = max(event.kv_tokens for event in bench.of(InstanceState))
    assert peak < 500 + 900 + 900


def test_a_resting_requests_kv_is_reused_and_only_the_gap_is_pulled_after_it_was_elsewhere() -> None:
    async def script(bench: Bench) -> None:
        bench.instance.submit(a_chunk(0, max_tokens=100))
        await bench.finish(1)
        bench.instance.submit(a_chunk(0, generated=100, max_tokens=100, attempt=2))
        await bench.finish(2)
        # A chunk of 300 tokens ran on another instance in between.
        bench.instance.submit(a_chunk(0, generated=500, max_tokens=100, attempt=4, load_kv=True))
        await bench.finish(3)

    bench = Bench({0: 5000}).run(script)
    assert [(e.num_tokens, e.num_recomputed, e.num_loaded) for e in bench.of(Prefilling)] == [
        (50, 0, 0),
        (0, 0, 0),
        (0, 0, 300),
    ]


def test_kv_that_is_neither_here_nor_pulled_is_recomputed() -> None:
    async def script(bench: Bench) -> None:
        bench.instance.submit(a_chunk(0, generated=400, max_tokens=10))
        await bench.finish(1)

    bench = Bench({0: 5000}).run(script)
    assert [(e.num_tokens, e.num_recomputed) for e in bench.of(Prefilling)] == [(450, 450)]


def test_pulled_kv_arrives_after_the_time_its_bytes_need() -> None:
    async def script(bench: Bench) -> None:
        bench.instance.submit(a_chunk(0, generated=4000, max_tokens=10, load_kv=True))
        await bench.finish(1)

    bench = Bench({0: 5000}).run(script)
    (prefilling,) = bench.of(Prefilling)
    assert prefilling.t_s == pytest.approx(bench.cost.transfer_s(4050))


def test_when_memory_runs_out_the_last_one_in_is_preempted_and_recomputed() -> None:
    async def script(bench: Bench) -> None:
        for request in range(3):
            bench.instance.submit(a_chunk(request))
        await bench.finish(3)

    bench = Bench(dict.fromkeys(range(3), 600), blocks=20).run(script)
    assert [event.request for event in bench.of(Preempted)] == [2, 1]
    assert sum(event.num_recomputed for event in bench.of(Prefilling)) > 0
    assert [output.num_tokens for _, output in bench.outputs] == [600] * 3
    assert max(event.kv_tokens for event in bench.of(InstanceState)) <= 20 * 64


def test_a_response_that_fills_the_memory_to_the_last_token_is_not_preempted() -> None:
    async def script(bench: Bench) -> None:
        bench.instance.submit(a_chunk(0, prompt=64, max_tokens=9 * 64))
        await bench.finish(1)

    bench = Bench({0: 9 * 64}, blocks=10).run(script)
    assert bench.of(Preempted) == []


def test_aborting_returns_what_was_generated_wherever_the_chunk_is() -> None:
    async def script(bench: Bench) -> None:
        bench.instance.submit(a_chunk(0))
        bench.instance.submit(a_chunk(1, generated=4000, load_kv=True))
        await asyncio.sleep(1.0)
        bench.instance.abort(0)
        bench.instance.submit(a_chunk(2))
        bench.instance.abort(2)
        bench.instance.abort(99)  # unknown: ignored
        await asyncio.sleep(1.0)

    bench = Bench({0: 900, 1: 9000, 2: 900}).run(script)
    ends = {output.request: output for _, output in bench.outputs}
    assert all(output.end is ChunkEnd.ABORTED for output in ends.values())
    assert 0 < ends[0].num_tokens < 900
    assert ends[2].num_tokens == 0
    assert len(bench.outputs) == 3  # request 1 ended when the instance was closed
    assert bench.instance.view().num_running == 0


def test_speculation_gains_more_than_a_token_a_step() -> None:
    async def script(bench: Bench) -> None:
        bench.instance.submit(a_chunk(0))
        await bench.finish(1)

    plain, drafted = Bench({0: 900}).run(script), Bench({0: 900}, speculation=True).run(script)
    assert drafted.outputs[0][0] < plain.outputs[0][0]
    assert drafted.outputs[0][1].num_tokens == 900
    assert max(event.accepted_per_step for event in drafted.of(InstanceState)) > 1.5


def test_requests_are_let_in_in_order_and_decode_once_their_context_is_computed() -> None:
    async def script(bench: Bench) -> None:
        for request in range(4):
            bench.instance.submit(a_chunk(request))
        await bench.finish(4)

    bench = Bench(dict.fromkeys(range(4), 10)).run(script)
    assert [event.request for event in bench.of(Prefilling)] == [0, 1, 2, 3]
    assert [event.request for event in bench.of(Decoding)] == [0, 1, 2, 3]


def test_a_pause_delays_every_end_by_its_own_length() -> None:
    def end_s(pause_s: float) -> float:
        async def script(bench: Bench) -> None:
            bench.instance.submit(a_chunk(0))
            await asyncio.sleep(0.5)
            await bench.instance.pause()
            bench.instance.submit(a_chunk(1))  # a chunk that arrives now waits as well
            await asyncio.sleep(pause_s)
            assert not bench.outputs
            assert bench.instance.view().num_running == 1
            await bench.instance.resume()
            await bench.finish(2)

        return Bench({0: 200, 1: 200}).run(script).outputs[-1][0]

    assert end_s(1000.0) == pytest.approx(end_s(0.0) + 1000.0)


def test_a_chunk_beyond_the_longest_context_is_refused_before_it_starts() -> None:
    async def script(bench: Bench) -> None:
        with pytest.raises(InstanceError, match="could reach"):
            bench.instance.submit(a_chunk(0, max_tokens=bench.instance.limits.max_model_len))

    assert not Bench({0: 10}).run(script).outputs
