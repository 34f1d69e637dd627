# SPDX-License-Identifier: Apache-2.0
"""Blocks that are not full at a turn's end: kept, found again on any instance, and never shared by two writers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engines import Generated, a_chunk, always, an_engine, generate, random_trees
from pools import an_engine_pool
from seer.engine.local.tiny import make_tiny_model
from seer.kvpool.keys import block_keys, part_key
from seer.kvpool.local import LocalPool
from seer.speculation.step_report import StepReport
from seer.types import Chunk, ChunkEnd, TokenSpan

BLOCK_SIZE = 8
PROMPT = [11, 45, 3, 99, 27, 64, 80, 5, 31, 77]
GIVEN = TokenSpan([60, 61, 62, 63, 64, 65, 66, 67, 68], (), 0, is_given=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=5)


@pytest.fixture
def pool(tmp_path: Path, folder: Path) -> Iterator[LocalPool]:
    with an_engine_pool(tmp_path, folder, block_size=BLOCK_SIZE, num_blocks=64) as opened:
        yield opened


def a_turn(folder: Path, num_tokens: int) -> Chunk:
    """A chunk that stops by itself after this many tokens."""
    free = generate(an_engine(folder), [a_chunk(0, PROMPT, max_tokens=40, seed=77)])[0]
    assert free.ids.index(free.ids[num_tokens - 1]) == num_tokens - 1
    return a_chunk(0, PROMPT, seed=77, has_turns=True, stop_token_ids=(free.ids[num_tokens - 1],))


def next_turn(first: Generated, request: int = 0) -> Chunk:
    return a_chunk(request, PROMPT, seed=78, spans=(first.span(), GIVEN), has_turns=True, max_tokens=20)


@pytest.mark.parametrize("num_tokens", [1, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("way", ["same instance", "other instance", "no pool"])
def test_after_a_wait_only_the_newest_token_and_those_given_are_computed(
    folder: Path, pool: LocalPool, num_tokens: int, way: str
) -> None:
    steps: list[StepReport] = []
    options: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "pool": None if way == "no pool" else pool,
        "on_step": steps.append,
    }
    here = an_engine(folder, **options)
    first = generate(here, [a_turn(folder, num_tokens)])[0]
    assert (first.end, len(first.ids)) == (ChunkEnd.STOP, num_tokens)
    steps.clear()
    there = an_engine(folder, **options) if way == "other instance" else here
    again = generate(there, [next_turn(first)])[0]
    assert sum(step.num_prefill_tokens for step in steps) == 1 + len(GIVEN.ids)
    assert there.num_missed_tokens == 0, "given tokens have no KV to be missed"
    assert any(step.loaded_bytes for step in steps) == (way == "other instance"), "what is here is not loaded"
    plain = generate(an_engine(folder), [a_chunk(0, [*PROMPT, *first.ids, *GIVEN.ids], seed=78, max_tokens=20)])[0]
    assert (again.ids, again.logprobs) == (plain.ids, plain.logprobs)


def test_a_part_has_one_writer_and_equal_siblings_do_not_disturb_each_other(folder: Path, pool: LocalPool) -> None:
    """Both had the same first turn. One goes on in the part that is cached, the other in a copy of the pool."""
    both: list[dict[str, Any]] = [{}, {"drafter": random_trees(3, 128), "budget": always(4)}]
    for drafts in both:
        engine = an_engine(folder, block_size=BLOCK_SIZE, pool=pool, **drafts)
        first = generate(engine, [a_turn(folder, 5)])[0]
        chunks = [next_turn(first, 0), next_turn(first, 1)]
        given = TokenSpan([90, 91], (), 0, is_given=True)
        chunks.append(a_chunk(2, PROMPT, seed=78, spans=(first.span(), given), has_turns=True, max_tokens=20))
        answers = generate(engine, chunks)
        for chunk in chunks:
            plain = generate(an_engine(folder), [a_chunk(9, chunk.token_ids(), seed=78, max_tokens=20)])[9]
            assert (answers[chunk.request].ids, answers[chunk.request].logprobs) == (plain.ids, plain.logprobs)


def test_a_part_that_was_evicted_everywhere_is_computed_again_and_equal(folder: Path) -> None:
    engine = an_engine(folder, block_size=BLOCK_SIZE, kv_blocks=8)
    first = generate(engine, [a_turn(folder, 5)])[0]
    generate(engine, [a_chunk(5, [100] * 50, max_tokens=8)])  # needs every block
    again = generate(engine, [next_turn(first)])[0]
    plain = generate(an_engine(folder), [a_chunk(0, [*PROMPT, *first.ids, *GIVEN.ids], seed=78, max_tokens=20)])[0]
    assert again.ids == plain.ids


def test_a_chunk_that_ends_by_its_lease_leaves_its_part_too(folder: Path, pool: LocalPool) -> None:
    steps: list[StepReport] = []
    here, there = (an_engine(folder, block_size=BLOCK_SIZE, pool=pool, on_step=steps.append) for _ in range(2))
    first = generate(here, [a_chunk(0, PROMPT, max_tokens=11)])[0]
    steps.clear()
    second = generate(there, [a_chunk(0, PROMPT, max_tokens=11, spans=(first.span(),))])[0]
    assert sum(step.num_prefill_tokens for step in steps) == 0  # every step decodes
    whole = generate(an_engine(folder), [a_chunk(0, PROMPT, max_tokens=22)])[0]
    assert [*first.ids, *second.ids] == whole.ids


def test_the_pool_holds_one_part_of_a_request_and_none_while_it_runs(folder: Path, pool: LocalPool) -> None:
    spans: tuple[TokenSpan, ...] = ()
    for number in range(6):
        engine = an_engine(folder, block_size=BLOCK_SIZE, pool=pool)
        spans += (generate(engine, [a_chunk(0, PROMPT, max_tokens=3, spans=spans)])[0].span(),)
        num_known = len(PROMPT) + 3 * (number + 1) - 1
        assert pool.stats().num_pinned_blocks == -(-num_known // BLOCK_SIZE)
    with torch.inference_mode():
        engine.add(a_chunk(0, PROMPT, max_tokens=30, spans=spans))
        engine.step()
    assert pool.stats().num_pinned_blocks == num_known // BLOCK_SIZE
    pool.free("0")
    assert pool.stats().num_blocks == 0


def test_the_key_of_a_part_is_the_key_of_nothing_else(folder: Path) -> None:
    namespace = an_engine(folder, block_size=BLOCK_SIZE).namespace
    tokens = list(range(20))
    keys = [key.tobytes() for key in block_keys(namespace, tokens)]
    parts = [part_key(namespace, keys[: at // 8], tokens[at // 8 * 8 : at]) for at in range(1, 20) if at % 8]
    assert len({*keys, *parts}) == len(keys) + len(parts)
    assert part_key(namespace, keys[:1], tokens[8:16]) == keys[1]
    assert part_key(namespace, [], [5]) != part_key(namespace, keys[:1], [5])
