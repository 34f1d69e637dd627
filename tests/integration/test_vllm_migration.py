# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM engines on a CPU, requests moving between them through the pool, with grouped drafts.

Each pair of engines is started once per pool. Everything is compared with one uninterrupted run without drafts.
"""

from __future__ import annotations

import asyncio
import mmap
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from pools import needs_mooncake
from seer.engine.local.sampling import SampleRow, processed
from seer.engine.local.tiny import make_tiny_model
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig
from seer.kvpool.mooncake_servers import MooncakeServers, MooncakeServersConfig
from seer.speculation.step_report import StepReport
from seer.types import ChunkEnd, ChunkOutput, Sampling, TokenSpan
from seer.verification.verify import PlainModel
from vllm_engines import HEAD_DIM, LoopThread, needs_vllm
from vllm_pair import BLOCK_SIZE, CHUNK_TOKENS, GROUP, RESPONSE_TOKENS, Pair, ids, raw, running

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", head_dim=HEAD_DIM)


@pytest.fixture(scope="module", params=["local", "mooncake"])
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pair]:
    from seer.engine.vllm.model_folder import read_folder

    block_bytes = read_folder(folder).block_bytes(BLOCK_SIZE, 4)
    thread = LoopThread()
    if request.param == "local":
        config: dict[str, Any] = {
            "name": f"test-{uuid.uuid4().hex[:8]}",
            "block_bytes": block_bytes,
            "dram_bytes": 32 << 20,
        }
        with LocalPool(LocalPoolConfig(populate=False, **config)) as pool:
            made = Pair(folder, {"backend": "local", "populate": False, **config}, thread)
            yield from running(made)
            pool.close(remove=True)
    else:
        needs_mooncake()
        with MooncakeServers(MooncakeServersConfig(dram_bytes=64 << 20, client_ttl_s=5)) as servers:
            config = {"owner_address": servers.owner_address, "block_bytes": block_bytes, "deadline_s": 10.0}
            yield from running(Pair(folder, {"backend": "mooncake", **config}, thread, load_async=True))
    thread.close()


def test_a_moving_group_with_drafts_has_the_tokens_of_one_uninterrupted_run(pair: Pair) -> None:
    # Without noise siblings say the same, and would find each other's KV in place of their own: so four pairs, each
    # with a last prompt token of its own, draft for each other as one group.
    variants = [i // 2 for i in range(8)]

    async def scenario() -> list[tuple[list[TokenSpan], list[TokenSpan]]]:
        await pair.begin("grouped")
        moved = await asyncio.gather(*(pair.moving(variant) for variant in variants))
        num_moves = 8 * (RESPONSE_TOKENS // CHUNK_TOKENS - 1)
        assert sum(instance.num_recomputed_tokens for instance in pair.instances) < BLOCK_SIZE * num_moves
        assert await pair.counts("loaded_blocks") >= num_moves // 2, "of a pair, one may find what the other loaded"
        if pair.pool["backend"] == "local":  # Mooncake knows no pins: a sibling's end may take shared blocks away
            assert await pair.counts("missed_blocks") == 0
        assert sum(instance.view().num_accepted for instance in pair.instances) > 0
        await pair.begin("none")
        return [(moved[i], await pair.whole(variants[i])) for i in range(8)]

    for moved, whole in pair.thread.run(scenario()):
        assert ids(moved) == ids(whole)
        assert raw(moved) == pytest.approx(raw(whole), abs=1e-5)


@pytest.mark.parametrize("load_kv", [True, False])
def test_steps_report_what_they_computed_and_what_they_loaded(pair: Pair, load_kv: bool) -> None:
    reports: list[StepReport] = []
    # Generated in no other test: an instance does not load what it still holds of one.
    own, others = (11, 12) if load_kv else (13, 14)

    async def scenario() -> tuple[int, float]:
        await pair.begin("none")
        before = await pair.counts("loaded_blocks")
        pair.instances[1].counts.on_step = reports.append
        request = pair.request()
        first = await pair.chunk(0, request, (), max_tokens=100, variant=own, load_kv=False)
        await pair.instances[0].settle_saves()
        spans = tuple(o.span for o in first if o.span)
        beside = pair.request()  # another request decodes there, so that steps are consecutive and are timed
        task = asyncio.create_task(pair.chunk(1, beside, (), max_tokens=RESPONSE_TOKENS, variant=others, load_kv=False))
        await pair.inbox.until(lambda: sum(o.num_tokens for o in pair.inbox.outputs if o.request == beside) > 8)
        await pair.chunk(1, request, spans, max_tokens=8, variant=own, load_kv=load_kv)
        await task
        pair.instances[1].counts.on_step = None
        return len(GROUP) + 1 + 100, await pair.counts("loaded_blocks") - before

    num_context, num_loaded = pair.thread.run(scenario())
    num_prefilled = sum(report.num_prefill_tokens for report in reports)
    seconds = [sum(report.load_s for report in reports), sum(report.overlapped_load_s for report in reports)]
    assert sum(r.num_batched_tokens - r.num_prefill_tokens for r in reports) == sum(r.num_emitted for r in reports)
    assert sum(report.loaded_bytes for report in reports) == num_loaded * pair.pool["block_bytes"]
    if load_kv:
        assert num_loaded > 0
        assert num_prefilled < BLOCK_SIZE
        assert [value > 0 for value in seconds] == [not pair.load_async, pair.load_async]
    else:
        assert num_loaded == 0
        assert seconds == [0.0, 0.0]
        assert num_context - len(GROUP) - BLOCK_SIZE <= num_prefilled < num_context


def test_a_conversation_goes_on_elsewhere_and_only_what_was_given_is_computed(pair: Pair) -> None:
    given = TokenSpan([50, 51, 52, 53, 54], (), 0, is_given=True)

    async def scenario() -> tuple[list[TokenSpan], list[TokenSpan], int]:
        await pair.begin("none")
        request = pair.request()
        first = await pair.chunk(0, request, (), max_tokens=50, variant=21, has_turns=True)  # ends in mid-block
        await pair.chunk(0, pair.request(), (), max_tokens=4, variant=22)  # saves go with the next step
        await pair.instances[0].settle_saves()
        spans = (*(o.span for o in first if o.span), given)
        before = pair.instances[1].num_recomputed_tokens
        second = await pair.chunk(1, request, spans, max_tokens=40, variant=21, has_turns=True)
        num_recomputed = pair.instances[1].num_recomputed_tokens - before
        plain = await pair.chunk(0, pair.request(), spans, max_tokens=40, variant=21, load_kv=False)
        return [o.span for o in second if o.span], [o.span for o in plain if o.span], num_recomputed

    moved, plain, num_recomputed = pair.thread.run(scenario())
    assert num_recomputed == 0
    assert ids(moved) == ids(plain)
    assert raw(moved) == pytest.approx(raw(plain), abs=1e-5)


def test_a_request_aborted_in_the_middle_continues_on_another_instance(pair: Pair) -> None:
    async def scenario() -> tuple[list[TokenSpan], list[TokenSpan]]:
        await pair.begin("grouped")
        request = pair.request()
        task = asyncio.create_task(pair.chunk(0, request, (), max_tokens=RESPONSE_TOKENS))
        await pair.inbox.until(lambda: sum(o.num_tokens for o in pair.inbox.outputs if o.request == request) > 40)
        pair.instances[0].abort(request)
        first = await task
        assert first[-1].end is ChunkEnd.ABORTED
        spans = tuple(o.span for o in first if o.span)
        left = RESPONSE_TOKENS - sum(len(span.ids) for span in spans)
        second = await pair.chunk(1, request, spans, max_tokens=left)
        await pair.begin("none")
        return [*spans, *(o.span for o in second if o.span)], await pair.whole()

    moved, whole = pair.thread.run(scenario())
    assert ids(moved) == ids(whole)


def test_stop_tokens_min_tokens_and_limits_are_counted_over_chunks(pair: Pair) -> None:
    async def scenario() -> None:
        await pair.begin("grouped")
        free = ids(await pair.whole())
        stop = free[45]
        first_at = free.index(stop)
        sampling = {"stop_token_ids": (stop,), "min_tokens": first_at + 2}
        request = pair.request()
        spans: tuple[TokenSpan, ...] = ()
        outputs: list[ChunkOutput] = []
        at = 0
        while not outputs or outputs[-1].end is ChunkEnd.LIMIT:
            outputs = await pair.chunk(at % 2, request, spans, max_tokens=20, sampling=sampling)
            spans += tuple(o.span for o in outputs if o.span)
            at += 1
            if sum(len(span.ids) for span in spans) >= RESPONSE_TOKENS:
                break
        generated = ids(list(spans))
        assert stop not in generated[: first_at + 2], "a stop token before min_tokens"
        assert generated[:first_at] == free[:first_at]
        if stop in generated:
            assert generated.index(stop) == len(generated) - 1
            assert (outputs[-1].end, outputs[-1].stop_token) == (ChunkEnd.STOP, stop)

    pair.thread.run(scenario())


def test_blocks_that_were_damaged_are_computed_again(pair: Pair) -> None:
    if pair.pool["backend"] != "local":
        pytest.skip("Mooncake's memory is its own")

    async def scenario() -> tuple[list[TokenSpan], list[TokenSpan], float]:
        await pair.begin("none")
        before = await pair.counts("missed_blocks")
        request = pair.request()
        first = await pair.chunk(0, request, (), max_tokens=100)
        await pair.instances[0].settle_saves()
        _damage(pair.pool["name"])
        spans = tuple(o.span for o in first if o.span)
        second = await pair.chunk(1, request, spans, max_tokens=RESPONSE_TOKENS - 100)
        missed = await pair.counts("missed_blocks") - before
        await pair.begin("none")
        return [*spans, *(o.span for o in second if o.span)], await pair.whole(), missed

    moved, whole, missed = pair.thread.run(scenario())
    assert missed > 0
    assert ids(moved) == ids(whole)


def _damage(name: str) -> None:
    """Flip a bit in every page of the blocks of a pool."""
    with LocalPool.attach(name, keeper=False) as pool:
        regions = pool._open_arena().regions()
        with open(pool._files.arena, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            start, size = regions["data"]
            for offset in range(start, start + size, 4096):
                memory[offset + 7] ^= 1


# Sampled tokens under drafts

NUM_SAMPLES = 3000
TEMPERATURE, TOP_P = 0.5, 0.95


def test_drafts_do_not_change_the_distribution_of_sampled_tokens(pair: Pair, folder: Path) -> None:
    if pair.pool["backend"] != "local":
        pytest.skip("the pool has no part in sampling")
    counts = pair.thread.run(sampled_pairs(pair))
    assert z_of(counts, exact_pairs(folder)) < 4.0
    assert sum(instance.view().num_accepted for instance in pair.instances) > 0


async def sampled_pairs(pair: Pair) -> Counter[tuple[int, ...]]:
    """Three tokens each; the first is sampled alone, the others are drafted for."""
    await pair.begin("grouped")
    sampling = {"temperature": TEMPERATURE, "top_p": TOP_P}
    permits = asyncio.Semaphore(48)
    generated: Counter[tuple[int, ...]] = Counter()

    async def one(number: int) -> None:
        async with permits:
            seed = 77_000 + number
            outputs = await pair.chunk(number % 2, pair.request(), (), max_tokens=3, sampling=sampling, seed=seed)
            generated[tuple(ids([o.span for o in outputs if o.span]))] += 1

    pair.inbox.outputs.clear()
    await asyncio.gather(*(one(number) for number in range(NUM_SAMPLES)))
    return generated


def exact_pairs(folder: Path, least: float = 1e-3) -> dict[tuple[int, ...], float]:
    """Probability of every likely triple, from a plain forward pass."""
    model = PlainModel(folder)
    sampling = Sampling(max_tokens=3, temperature=TEMPERATURE, top_p=TOP_P)

    def following(context: tuple[int, ...]) -> dict[int, float]:
        logits = model.logits([*GROUP, 60, *context], len(GROUP) + len(context))[-1]
        shares = processed(logits, SampleRow(sampling=sampling, seed=0, position=0)).softmax(0)
        return {int(token): float(shares[token]) for token in torch.nonzero(shares > 0).flatten()}

    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        known = {
            (*before, token): share * next_share
            for before, share in known.items()
            for token, next_share in following(before).items()
            if share * next_share > least
        }
    return known


def test_a_request_with_one_token_to_compute_samples_from_its_own_distribution(pair: Pair, folder: Path) -> None:
    # vLLM fills the step of such a request with as many placeholders as a draft may have. Where they are verified by
    # the kernel for a CPU, one is taken as often as the row before it holds the last token of the vocabulary, and the
    # response goes on from it unseen. So: a prompt after which, and after its fillers, that token is likely.
    if pair.pool["backend"] != "local":
        pytest.skip("the pool has no part in sampling")
    model = PlainModel(folder)
    blocks = GROUP[:BLOCK_SIZE]
    prompt = max(([*blocks, token] for token in GROUP), key=lambda prompt: last_token_share(model, prompt))

    async def scenario() -> tuple[list[TokenSpan], int]:
        await pair.begin("grouped")
        drawn = {"prompt": prompt, "max_tokens": 1, "sampling": {"temperature": 1.0}}
        await pair.chunk(0, pair.request(), (), **drawn)  # from here on all but the last token of the prompt is known
        before = pair.instances[0].view().num_drafted
        outputs = await asyncio.gather(*(pair.chunk(0, pair.request(), (), **drawn) for _ in range(64)))
        spans = [output.span for chunk in outputs for output in chunk if output.span]
        return spans, pair.instances[0].view().num_drafted - before

    spans, num_drafted = pair.thread.run(scenario())
    assert num_drafted > 0, "vLLM fills such steps no more: nothing was tested"
    exact = model.logits(prompt, len(prompt) - 1)[-1].log_softmax(0)
    assert [span.logprobs[0] for span in spans] == pytest.approx(
        [float(exact[span.ids[0]]) for span in spans], abs=1e-4
    )


def last_token_share(model: PlainModel, prompt: list[int], num_filled: int = 8) -> float:
    """Of the vocabulary's last token, after the prompt and all placeholders but one; vLLM computes them as token 0."""
    return float(model.logits([*prompt, *[0] * (num_filled - 1)], len(prompt))[-1].softmax(0)[-1])


def z_of(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """How far the counts are from what is expected, in standard deviations of chi-square; the rest is one class."""
    total = sum(counts.values())
    frequent = {key: share for key, share in exact.items() if share * total >= 8}
    rest = 1.0 - sum(frequent.values())
    seen = [counts[key] for key in frequent]
    expected = [share * total for share in frequent.values()]
    chi = sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))
    chi += (total - sum(seen) - rest * total) ** 2 / (rest * total)
    degrees = len(frequent)
    return float((chi - degrees) / (2 * degrees) ** 0.5)
