# SPDX-License-Identifier: Apache-2.0
"""What every instance that computes a real model promises, beyond test_instance_contract.py.

Log-probabilities are those of a plain forward pass, stop reasons are right, an abort returns what was generated, and
overload is refused. An implementation joins by adding a maker to `MAKERS`. Where tokens are compared with the local
engine's, vLLM samples greedily: its noise is its own.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tokenizers import Tokenizer, decoders, models

from engines import a_chunk, an_engine, generate
from inbox import OutputInbox, play_on
from seer.engine.base import Instance, ModelInstance
from seer.engine.local import LocalInstance
from seer.engine.local.tiny import make_tiny_model, tiny_config, tiny_weights
from seer.errors import InputError, InstanceError, NoProbability, Overloaded
from seer.speculation.step_report import StepReport
from seer.types import ChunkEnd, ChunkOutput, TokenSpan
from vllm_engines import HEAD_DIM, LoopThread, SharedEngine, needs_vllm

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def local(folder: Path, **limits: int) -> Instance:
    return LocalInstance(0, folder, **({"kv_blocks": 128, "block_size": 4, "stream_tokens": 1} | limits))  # type: ignore[arg-type]


MAKERS = [local, pytest.param("vllm", marks=needs_vllm)]


class Inbox(OutputInbox):
    """Reads outputs the way this suite asks for them."""

    def tokens(self, request: int) -> list[int]:
        return [t for o in self.outputs if o.request == request and o.span for t in o.span.ids]

    def end(self, request: int) -> ChunkOutput:
        (end,) = (o for o in self.outputs if o.request == request and o.end)
        return end


Scenario = Callable[[Instance, Inbox], Awaitable[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=2, head_dim=HEAD_DIM)
    letters = Tokenizer(models.WordLevel({letter(i): i for i in range(128)}, unk_token=letter(0)))
    letters.decoder = decoders.Fuse()
    letters.save(str(model / "tokenizer.json"))
    return model


def letter(token: int) -> str:
    """The text of a token."""
    return chr(0x4E00 + token)


@pytest.fixture(scope="module")
def vllm_engine(folder: Path) -> Iterator[SharedEngine]:
    thread = LoopThread()
    engine = SharedEngine(folder, thread, stream_tokens=1)
    yield engine
    engine.close()
    thread.close()


class Play:
    """Plays a scenario on a fresh instance."""

    def __init__(
        self, make: Callable[..., Instance], run: Callable[[Coroutine[Any, Any, None]], None], temperature: float
    ) -> None:
        self._make, self._run = make, run
        self.temperature = temperature

    def __call__(self, scenario: Scenario, **limits: int) -> Inbox:
        inbox = Inbox()
        self._run(play_on(lambda: self._make(**limits), inbox, scenario))
        return inbox


@pytest.fixture(params=MAKERS, ids=lambda maker: getattr(maker, "__name__", maker))
def play(request: pytest.FixtureRequest, folder: Path) -> Iterator[Play]:
    if request.param != "vllm":
        yield Play(lambda **limits: request.param(folder, **limits), asyncio.run, temperature=1.0)
        return
    engine: SharedEngine = request.getfixturevalue("vllm_engine")
    yield Play(engine.instance, engine.thread.run, temperature=0.0)
    engine.thread.run(engine.restore())


def test_more_contexts_at_once_than_one_step_takes(play: Play) -> None:
    """Drawn with noise: vLLM's noise is a generator for each request, and what it does while a context is computed is
    not the same on every device.
    """

    async def scenario(instance: Instance, inbox: Inbox) -> None:
        for i in range(24):
            prompt = [3 + (7 * i + j) % 90 for j in range(200)]
            instance.submit(a_chunk(i, prompt, max_tokens=3, temperature=1.0, ignore_eos=True))
        await inbox.ends(*range(24))

    inbox = play(scenario, **({"kv_blocks": 2048} if play.temperature else {}))
    assert [(inbox.end(i).end, len(inbox.tokens(i))) for i in range(24)] == [(ChunkEnd.LIMIT, 3)] * 24


def test_log_probabilities_are_those_of_a_plain_forward_pass(play: Play, folder: Path) -> None:
    sampling: dict[str, Any] = {"temperature": 0.8 * play.temperature, "top_k": 50}

    async def scenario(instance: Instance, inbox: Inbox) -> None:
        for i in range(4):
            instance.submit(a_chunk(i, PROMPT[: 2 + i], max_tokens=20, **sampling))
        await inbox.ends(*range(4))

    inbox = play(scenario)
    for i in range(4):
        generated = inbox.tokens(i)
        # The specification, asked for one token at a time after each prefix.
        plain = an_engine(folder, kernels="torch")
        raw = [value for o in inbox.outputs if o.request == i and o.span for value in o.span.raw_logprobs or ()]
        context, draw = PROMPT[: 2 + i], {"seed": 1000 + i, **sampling}
        forced = [
            generate(plain, [a_chunk(100 + at, context + generated[:at], max_tokens=1, **draw)])
            for at in range(len(generated))
        ]
        answers = [answer for one in forced for answer in one.values()]
        assert [answer.ids[0] for answer in answers] == generated
        assert raw == pytest.approx([answer.raw_logprobs[0] for answer in answers], abs=1e-4)
        logprobs = [value for o in inbox.outputs if o.request == i and o.span for value in o.span.logprobs]
        assert logprobs == pytest.approx([answer.logprobs[0] for answer in answers], abs=1e-4)


def test_stop_reasons_are_right(play: Play, folder: Path) -> None:
    free = generate(an_engine(folder), [a_chunk(0, PROMPT, max_tokens=30, temperature=play.temperature)])[0].ids

    async def scenario(instance: Instance, inbox: Inbox) -> None:
        instance.submit(a_chunk(0, PROMPT, max_tokens=30, stop_token_ids=(free[5],), temperature=play.temperature))
        instance.submit(a_chunk(1, PROMPT, max_tokens=3, seed=1000, temperature=play.temperature))
        await inbox.ends(0, 1)

    inbox = play(scenario)
    assert (inbox.end(0).end, inbox.end(0).stop_token) == (ChunkEnd.STOP, free[5])
    assert inbox.tokens(0) == free[: free.index(free[5]) + 1]
    assert (inbox.end(1).end, inbox.end(1).stop_token, inbox.tokens(1)) == (ChunkEnd.LIMIT, None, free[:3])


def test_a_stop_string_ends_a_chunk_with_the_token_that_completes_it(play: Play, folder: Path) -> None:
    free = generate(an_engine(folder), [a_chunk(0, PROMPT, max_tokens=60, temperature=play.temperature)])[0].ids
    ends = [at + 1 for at in range(6, 59) if (free[at - 1], free[at]) not in list(itertools.pairwise(free[:at]))]
    stop = letter(free[ends[0] - 2]) + letter(free[ends[0] - 1])

    async def scenario(instance: Instance, inbox: Inbox) -> None:
        instance.submit(a_chunk(0, PROMPT, max_tokens=60, stop=(stop,), temperature=play.temperature))
        await inbox.ends(0)
        spans = tuple(output.span for output in inbox.outputs if output.span is not None)
        given = TokenSpan([9, 9], (), 0, is_given=True)
        # The request goes on at once: the instance has forgotten the chunk that the string ended.
        instance.submit(a_chunk(0, PROMPT, max_tokens=2, spans=(*spans, given), stop=(stop,), has_turns=True))
        await inbox.until(lambda: sum(output.end is not None for output in inbox.outputs) == 2)

    inbox = play(scenario)
    first, second = (output for output in inbox.outputs if output.end is not None)
    assert (first.end, first.stop_token) == (ChunkEnd.STOP, None)
    assert second.end is not ChunkEnd.FAILED
    assert inbox.tokens(0)[: ends[0]] == free[: ends[0]]
    assert len(inbox.tokens(0)) <= ends[0] + 2


def test_a_stop_token_that_completes_a_stop_string_is_named(play: Play, folder: Path) -> None:
    free = generate(an_engine(folder), [a_chunk(0, PROMPT, max_tokens=30, temperature=play.temperature)])[0].ids
    last = next(at for at in range(5, 30) if free[at] not in free[:at])
    ends: dict[str, Any] = {"stop": (letter(free[last]),), "stop_token_ids": (free[last],)}

    async def scenario(instance: Instance, inbox: Inbox) -> None:
        instance.submit(a_chunk(0, PROMPT, max_tokens=30, temperature=play.temperature, **ends))
        await inbox.ends(0)

    inbox = play(scenario)
    assert inbox.tokens(0) == free[: last + 1]
    assert (inbox.end(0).end, inbox.end(0).stop_token) == (ChunkEnd.STOP, free[last])


def test_an_abort_returns_what_was_generated(play: Play, folder: Path) -> None:
    free = generate(an_engine(folder), [a_chunk(0, PROMPT, max_tokens=400, temperature=play.temperature)])[0].ids

    async def scenario(instance: Instance, inbox: Inbox) -> None:
        instance.submit(a_chunk(0, PROMPT, max_tokens=400, temperature=play.temperature))
        await inbox.until(lambda: len(inbox.tokens(0)) >= 5)
        instance.abort(0)
        await inbox.ends(0)

    inbox = play(scenario)
    generated = inbox.tokens(0)
    assert generated == free[: len(generated)]
    assert inbox.end(0).end in (ChunkEnd.ABORTED, ChunkEnd.LIMIT)


def test_overload_is_refused_and_the_rest_goes_on(play: Play) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        await instance.pause()
        with pytest.raises(InstanceError, match=r"outside 0\.\.127"):
            instance.submit(a_chunk(8, [500], max_tokens=10))
        too_much = instance.limits.kv_tokens  # of one request, its prompt apart
        with pytest.raises(Overloaded, match="KV blocks"):
            instance.submit(a_chunk(9, PROMPT, max_tokens=too_much))
        for i in range(3):
            instance.submit(a_chunk(i, PROMPT, max_tokens=10))
        with pytest.raises(Overloaded, match="already holds 3"):
            instance.submit(a_chunk(3, PROMPT, max_tokens=10))
        with pytest.raises(InstanceError, match="already runs"):
            instance.submit(a_chunk(0, PROMPT, max_tokens=10))
        with pytest.raises(InstanceError, match="weights version 5"):
            instance.submit(a_chunk(7, PROMPT, weights_version=5))
        await instance.resume()
        await inbox.ends(0, 1, 2)

    inbox = play(scenario, kv_blocks=10, max_num_seqs=2, max_waiting=1)
    assert {o.request for o in inbox.outputs} == {0, 1, 2}


def test_new_weights_take_effect_and_old_kv_is_not_used(play: Play, tmp_path: Path) -> None:
    fresh = make_tiny_model(tmp_path / "fresh", seed=77, head_dim=HEAD_DIM)
    expected = generate(an_engine(fresh), [a_chunk(1, PROMPT * 5, max_tokens=20, temperature=play.temperature)])[1].ids
    weights = tiny_weights(tiny_config(head_dim=HEAD_DIM), seed=77)

    async def scenario(instance: Instance, inbox: Inbox) -> None:
        old = a_chunk(0, PROMPT * 5, max_tokens=20, temperature=play.temperature)
        instance.submit(old)
        await inbox.ends(0)
        assert instance.cached_prefix_tokens(old) >= 20
        await instance.update_weights(weights, 1)
        new = a_chunk(1, PROMPT * 5, max_tokens=20, weights_version=1, temperature=play.temperature)
        assert instance.cached_prefix_tokens(new) == 0
        with pytest.raises(InstanceError, match="weights version 0"):
            instance.submit(old)
        instance.submit(new)
        await inbox.ends(1)
        with pytest.raises(InstanceError, match="not newer"):
            await instance.update_weights(weights, 1)

    inbox = play(scenario)
    assert inbox.tokens(1) == expected
    assert inbox.tokens(0) != expected


def test_weights_that_do_not_fit_change_nothing(play: Play) -> None:
    async def scenario(instance: Instance, inbox: Inbox) -> None:
        with pytest.raises(Exception, match="lack"):
            await instance.update_weights({}, 1)
        instance.submit(a_chunk(0, PROMPT, max_tokens=5))
        await inbox.ends(0)

    assert play(scenario).end(0).end is ChunkEnd.LIMIT


@pytest.mark.parametrize("_", [pytest.param("vllm", marks=needs_vllm)])
def test_steps_are_counted_without_a_pool(_: str, vllm_engine: SharedEngine) -> None:
    reports: list[StepReport] = []

    async def scenario(instance: Any, inbox: Inbox) -> None:
        instance.submit(a_chunk(0, PROMPT, max_tokens=200, ignore_eos=True))
        await inbox.until(lambda: bool(inbox.outputs))  # so that every step from here on is one of a row
        instance.counts.on_step = reports.append
        for i in range(1, 5):
            instance.submit(a_chunk(i, [20 + i] * (10 * i), max_tokens=5, ignore_eos=True))
        await inbox.ends(*range(5))

    Play(vllm_engine.instance, vllm_engine.thread.run, temperature=0.0)(scenario)
    assert sum(report.num_prefill_tokens for report in reports) == sum(10 * i - 1 for i in range(1, 5))
    assert (
        sum(r.num_batched_tokens - r.num_prefill_tokens for r in reports) == sum(r.num_emitted for r in reports) > 100
    )
    assert all(report.duration_s > 0 for report in reports)


@pytest.mark.parametrize("part", ["forward", "scheduler", "the way to end chunks too"])
def test_a_step_that_breaks_fails_all_chunks_by_name_and_breaks_the_instance(folder: Path, part: str) -> None:
    instance, inbox = LocalInstance(0, folder, kv_blocks=64), Inbox()

    def fail(*_: object) -> Any:
        raise ZeroDivisionError(part)

    async def main() -> None:
        await instance.start(inbox)
        engine: Any = instance.engine
        if part == "scheduler":
            engine.scheduler.plan = fail
        else:
            engine.model.forward = fail
        if part == "the way to end chunks too":
            engine.scheduler.leave = fail
        assert instance.failure is None
        instance.submit(a_chunk(0, PROMPT, max_tokens=5))
        instance.submit(a_chunk(1, PROMPT, max_tokens=5))
        instance.abort(1)
        await inbox.ends(0, 1)
        with pytest.raises(InstanceError, match="instance 0 has failed: ZeroDivisionError"):
            instance.submit(a_chunk(2, PROMPT, max_tokens=5))
        with pytest.raises(InstanceError, match="instance 0 has failed: ZeroDivisionError"):
            await instance.update_weights({}, 1)
        await instance.close()

    asyncio.run(main())
    assert inbox.end(0).end is ChunkEnd.FAILED
    assert "ZeroDivisionError" in str(inbox.end(0).error)
    assert inbox.end(1).end is not None
    assert len([output for output in inbox.outputs if output.end]) == 2, "one end each"


def test_chunks_end_also_if_the_engine_cannot_end_them(folder: Path) -> None:
    instance, inbox = LocalInstance(0, folder, kv_blocks=64), Inbox()

    async def main() -> None:
        await instance.start(inbox)
        await instance.pause()
        instance.engine.scheduler.leave = lambda _: 1 / 0  # type: ignore[assignment, method-assign]
        instance.submit(a_chunk(0, PROMPT, max_tokens=5))
        await instance.close()

    asyncio.run(main())
    assert inbox.end(0).end is ChunkEnd.ABORTED


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name_and_change_nothing(play: Play, value: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weights = tiny_weights(tiny_config(head_dim=HEAD_DIM), seed=5)
    weights[name][3, 5:7] = value

    async def scenario(instance: Instance, inbox: Inbox) -> None:
        instance.submit(a_chunk(0, PROMPT, max_tokens=10, temperature=play.temperature))
        await inbox.ends(0)
        with pytest.raises(InputError, match=f"{name} has 2 values of 6144 ") as refused:
            await instance.update_weights(weights, 1)
        assert "the trainer diverged" in str(refused.value.hint)
        instance.submit(a_chunk(1, PROMPT, max_tokens=10, temperature=play.temperature, seed=1000))
        await inbox.ends(1)

    inbox = play(scenario)
    assert inbox.tokens(0) == inbox.tokens(1)


@pytest.mark.parametrize("logprobs", [True, False])
def test_a_model_that_gives_no_probability_ends_its_chunks_by_request_and_position(play: Play, logprobs: bool) -> None:
    weights = tiny_weights(tiny_config(head_dim=HEAD_DIM), seed=5)
    weights["model.norm.weight"] *= 2e38  # finite, and the logits are not

    async def scenario(instance: Instance, inbox: Inbox) -> None:
        await instance.update_weights(weights, 1)
        for request in (7, 8):
            sampling: dict[str, Any] = {"temperature": play.temperature, "logprobs": logprobs}
            instance.submit(a_chunk(request, PROMPT, max_tokens=10, weights_version=1, **sampling))
        await inbox.ends(7, 8)
        assert isinstance(instance, ModelInstance)
        assert isinstance(instance.failure, NoProbability)
        with pytest.raises(InstanceError, match="has failed"):
            instance.submit(a_chunk(9, PROMPT, max_tokens=10, weights_version=1))

    inbox = play(scenario)
    for request in (7, 8):
        assert inbox.tokens(request) == []
        assert inbox.end(request).end is ChunkEnd.FAILED
        assert f"position {len(PROMPT)}: the model gives no probability" in str(inbox.end(request).error)


def test_a_call_that_is_cancelled_before_it_began_changes_nothing(folder: Path) -> None:
    instance, inbox = LocalInstance(0, folder, kv_blocks=32), Inbox()
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(30)

    async def main() -> None:
        await instance.start(inbox)
        holding = asyncio.create_task(instance._ask(hold))
        assert await asyncio.to_thread(begun.wait, 30)
        calls = [asyncio.create_task(instance.pause()), holding]
        await asyncio.sleep(0)  # it is in the queue
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        go_on.set()
        instance.submit(a_chunk(1, PROMPT, max_tokens=5))
        await inbox.ends(1)
        assert instance.failure is None
        await instance.close()

    asyncio.run(main())
    assert len(inbox.tokens(1)) == 5


def test_no_instance_starts_a_chunk_while_another_changes_the_weights_they_share(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compute with some matrices of the old weights and some of the new."""
    first, second = LocalInstance(0, folder, kv_blocks=32), LocalInstance(1, folder, kv_blocks=32)
    inbox, reading, go_on = Inbox(), threading.Event(), threading.Event()

    class SlowWeights(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            reading.set()
            assert go_on.wait(30)
            return super().__getitem__(name)

    good = tiny_weights(tiny_config(head_dim=HEAD_DIM), seed=5)
    bad = good | {"model.norm.weight": torch.full_like(good["model.norm.weight"], math.nan)}

    async def main() -> None:
        await first.start(inbox)
        await second.start(inbox)
        for weights in (bad, good):
            reading.clear()
            go_on.clear()
            update = asyncio.create_task(first.update_weights(SlowWeights(weights), 1))
            assert await asyncio.to_thread(reading.wait, 30)
            with pytest.raises(InstanceError, match="its process has loaded 1"):
                second.submit(a_chunk(1, PROMPT, max_tokens=5))
            go_on.set()
            if weights is bad:
                with pytest.raises(InputError):
                    await update
                second.submit(a_chunk(2, PROMPT, max_tokens=5))  # the old weights are still there
                await inbox.ends(2)
        await update
        await first.close()
        await second.close()

    asyncio.run(main())


def test_instances_of_one_process_share_their_weights_and_agree_on_the_weights_version(folder: Path) -> None:
    first, second = LocalInstance(0, folder, kv_blocks=32), LocalInstance(1, folder, kv_blocks=32)
    inbox = Inbox()

    async def main() -> None:
        await first.start(inbox)
        await second.start(inbox)
        assert first.engine.model.weights is second.engine.model.weights
        weights = tiny_weights(tiny_config(head_dim=HEAD_DIM), seed=5)
        await second.pause()
        second.submit(a_chunk(0, PROMPT, max_tokens=5))
        with pytest.raises(InstanceError, match="shares the weights"):
            await first.update_weights(weights, 1)
        await second.resume()
        await inbox.ends(0)
        await first.update_weights(weights, 1)
        with pytest.raises(InstanceError, match="its process has loaded 1"):
            second.submit(a_chunk(1, PROMPT, max_tokens=5))
        await second.update_weights(weights, 1)
        second.submit(a_chunk(2, PROMPT, max_tokens=5, weights_version=1))
        await inbox.ends(2)
        await first.close()
        await second.close()

    asyncio.run(main())
