# SPDX-License-Identifier: Apache-2.0
"""A request that moves between engines through the pool goes on as if it had stayed, and old KV is never read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

from engines import a_chunk, always, an_engine, generate, random_trees, tokens_of
from pools import an_engine_pool
from seer.engine.local.assembly import update
from seer.engine.local.tiny import make_tiny_model, tiny_config, tiny_weights
from seer.kvpool.local import LocalPool
from seer.kvpool.none import NonePool
from seer.speculation.step_report import StepReport
from seer.types import TokenSpan

BLOCK_SIZE = 8
PROMPT = [11, 45, 3, 99, 27, 64, 80, 5, 31, 77, 12, 19, 101, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=5)


@pytest.fixture
def pool(tmp_path: Path, folder: Path) -> Iterator[LocalPool]:
    with an_engine_pool(tmp_path, folder, block_size=BLOCK_SIZE, num_blocks=512) as opened:
        yield opened


def computed_tokens(steps: list[StepReport]) -> int:
    return sum(step.num_batched_tokens - step.num_drafted for step in steps)


def test_imported_kv_equals_recomputed_kv(folder: Path, pool: LocalPool) -> None:
    whole = generate(an_engine(folder, block_size=BLOCK_SIZE), [a_chunk(0, PROMPT, max_tokens=80)])[0]
    here = an_engine(folder, block_size=BLOCK_SIZE, pool=pool, drafter=random_trees(2, 128), budget=always(5))
    first = generate(here, [a_chunk(0, PROMPT, max_tokens=40)])[0]

    steps: list[StepReport] = []
    there = an_engine(folder, block_size=BLOCK_SIZE, pool=pool, on_step=steps.append)
    second = generate(there, [a_chunk(0, PROMPT, max_tokens=40, spans=(first.span(),))])[0]
    assert first.ids + second.ids == whole.ids
    assert first.logprobs + second.logprobs == whole.logprobs
    # 54 context tokens, of which 53 were computed: 6 full blocks of 8 and a part, so 1 row instead of 54.
    assert computed_tokens(steps) == 40
    assert pool.stats().num_hit_dram == 7


def test_without_load_kv_it_is_recomputed_and_equal(folder: Path, pool: LocalPool) -> None:
    whole = generate(an_engine(folder, block_size=BLOCK_SIZE), [a_chunk(0, PROMPT, max_tokens=60)])[0]
    here = an_engine(folder, block_size=BLOCK_SIZE, pool=pool)
    first = generate(here, [a_chunk(0, PROMPT, max_tokens=30)])[0]
    there = an_engine(folder, block_size=BLOCK_SIZE, pool=pool)
    chunk = a_chunk(0, PROMPT, max_tokens=30, spans=(first.span(),), load_kv=False)
    assert first.ids + generate(there, [chunk])[0].ids == whole.ids
    assert pool.stats().num_hit_dram == 0


def test_a_request_that_is_over_makes_room_in_the_pool(folder: Path, pool: LocalPool) -> None:
    engine = an_engine(folder, block_size=BLOCK_SIZE, pool=pool)
    first = generate(engine, [a_chunk(0, PROMPT, max_tokens=40)])[0]
    assert pool.stats().num_pinned_blocks == 7  # it may go on, so its KV is kept, the last part too
    chunk = a_chunk(0, PROMPT, max_tokens=20, spans=(first.span(),))
    over = msgspec.structs.replace(chunk, sampling=replace(chunk.sampling, max_tokens=60))
    generate(engine, [over])
    assert pool.stats().num_blocks == 0


def test_random_migrations_through_the_pool_change_nothing(folder: Path, pool: LocalPool) -> None:
    dice = random.Random(4)
    num_requests, num_tokens = 12, 70
    prompts = [[dice.randrange(3, 128) for _ in range(dice.randint(1, 40))] for _ in range(num_requests)]
    plain = generate(
        an_engine(folder, max_num_seqs=1, block_size=BLOCK_SIZE),
        [a_chunk(i, p, max_tokens=num_tokens, temperature=float(i % 2)) for i, p in enumerate(prompts)],
    )
    fleet = [
        an_engine(folder, block_size=BLOCK_SIZE, pool=pool, kv_blocks=60, max_num_seqs=3),
        an_engine(folder, block_size=BLOCK_SIZE, pool=pool, drafter=random_trees(8, 128), budget=always(6)),
        an_engine(folder, block_size=BLOCK_SIZE, pool=NonePool()),
    ]
    spans: dict[int, tuple[TokenSpan, ...]] = dict.fromkeys(range(num_requests), ())
    left = dict.fromkeys(range(num_requests), num_tokens)
    while any(left.values()):
        for engine in fleet:
            chosen = [i for i in left if left[i] and dice.random() < 0.4]
            wave = [
                a_chunk(
                    i,
                    prompts[i],
                    max_tokens=min(left[i], dice.randint(1, 30)),
                    spans=spans[i],
                    temperature=float(i % 2),
                )
                for i in chosen
            ]
            for i, answer in generate(engine, wave).items():
                spans[i] = (*spans[i], answer.span())
                left[i] -= len(answer.ids)
    assert {i: [t for span in spans[i] for t in span.ids] for i in spans} == tokens_of(plain)
    assert pool.stats().num_hit_dram > 0


def test_new_weights_take_effect_and_old_kv_is_not_used(folder: Path, pool: LocalPool) -> None:
    other = tiny_weights(tiny_config(), seed=99)
    engine = an_engine(folder, block_size=BLOCK_SIZE, pool=pool)
    before = generate(engine, [a_chunk(0, PROMPT, max_tokens=40)])[0]
    held = engine.scheduler.blocks.num_cached
    assert held > 0

    with torch.inference_mode():
        update(engine, other, 1)
    assert engine.scheduler.blocks.num_cached == 0
    after = generate(engine, [a_chunk(1, PROMPT, max_tokens=40, seed=1000, weights_version=1)])[1]
    assert after.ids != before.ids
    assert pool.stats().num_hit_dram == 0

    fresh_folder = make_tiny_model(folder.parent / "other", seed=99)
    fresh = generate(an_engine(fresh_folder, block_size=BLOCK_SIZE), [a_chunk(0, PROMPT, max_tokens=40)])[0]
    assert after.ids == fresh.ids


def test_reading_old_kv_would_have_been_noticed(folder: Path) -> None:
    """The test above has teeth: with the old KV kept, tokens differ from a fresh engine's."""
    other = tiny_weights(tiny_config(), seed=99)
    engine = an_engine(folder, block_size=BLOCK_SIZE)
    generate(engine, [a_chunk(0, PROMPT * 3, max_tokens=40)])
    engine.scheduler.blocks.forget_all = lambda: None  # type: ignore[method-assign]
    namespace = engine.namespace
    with torch.inference_mode():
        update(engine, other, 1)
    engine.namespace = namespace
    stale = generate(engine, [a_chunk(1, PROMPT * 3, max_tokens=40, seed=1000)])[1]
    fresh_folder = make_tiny_model(folder.parent / "other2", seed=99)
    fresh = generate(an_engine(fresh_folder, block_size=BLOCK_SIZE), [a_chunk(0, PROMPT * 3, max_tokens=40)])[0]
    assert stale.raw_logprobs != fresh.raw_logprobs
