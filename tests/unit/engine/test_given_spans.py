# SPDX-License-Identifier: Apache-2.0
"""Given tokens inside the embedded engine: computed as a context, drafted from, and counted for nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engines import FunctionDrafter, a_chunk, always, an_engine, generate
from pools import an_engine_pool
from seer.drafting.base import DraftTree
from seer.engine.local.tiny import make_tiny_model
from seer.kvpool.base import part_owner
from seer.kvpool.local import LocalPool
from seer.speculation.step_report import StepReport
from seer.types import ChunkEnd, TokenSpan

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


def test_a_turn_goes_on_as_if_all_before_it_were_its_prompt(folder: Path) -> None:
    engine = an_engine(folder)
    first = generate(engine, [a_chunk(0, PROMPT, max_tokens=20)])[0]
    spans = (first.span(), GIVEN)
    second = generate(engine, [a_chunk(0, PROMPT, max_tokens=20, spans=spans)])[0]
    plain = generate(an_engine(folder), [a_chunk(0, [*PROMPT, *first.ids, *GIVEN.ids], max_tokens=20)])[0]
    assert (second.ids, second.logprobs) == (plain.ids, plain.logprobs)


def test_given_tokens_are_observed_by_the_drafter_in_their_place(folder: Path) -> None:
    drafter = FunctionDrafter(lambda ask: DraftTree())
    engine = an_engine(folder, drafter=drafter)
    first = generate(engine, [a_chunk(0, PROMPT, max_tokens=5)])[0]
    second = generate(engine, [a_chunk(0, PROMPT, max_tokens=5, spans=(first.span(), GIVEN))])[0]
    assert drafter.observed[0] == [*first.ids, *GIVEN.ids, *second.ids]


def test_limits_count_generated_tokens_only(folder: Path) -> None:
    """A stop token that is likelier than all others is not sampled before min_tokens generated ones."""
    engine = an_engine(folder)
    free = generate(engine, [a_chunk(0, PROMPT, max_tokens=30, spans=(GIVEN,))])[0]
    stop = free.ids[2]
    early = a_chunk(0, PROMPT, max_tokens=30, spans=(GIVEN,), stop_token_ids=(stop,), min_tokens=8)
    answer = generate(engine, [early])[0]
    assert stop not in answer.ids[:8]
    assert generate(engine, [a_chunk(0, PROMPT, max_tokens=30, spans=(GIVEN,), stop_token_ids=(stop,))])[0].end is (
        ChunkEnd.STOP
    )


def test_a_stopped_turn_keeps_its_kv_in_the_pool_and_only_given_tokens_are_new(folder: Path, pool: LocalPool) -> None:
    here = an_engine(folder, block_size=BLOCK_SIZE, pool=pool)
    free = generate(here, [a_chunk(1, PROMPT, max_tokens=30, seed=77)])[1]
    pool.free("1")
    pool.free(part_owner("1"))
    stop = free.ids[15]
    first = generate(here, [a_chunk(0, PROMPT, seed=77, has_turns=True, stop_token_ids=(stop,))])[0]
    assert first.end is ChunkEnd.STOP
    num_known = len(PROMPT) + len(first.ids) - 1
    assert num_known % BLOCK_SIZE  # the last block is not full
    assert pool.stats().num_pinned_blocks == num_known // BLOCK_SIZE + 1

    steps: list[StepReport] = []
    there = an_engine(folder, block_size=BLOCK_SIZE, pool=pool, on_step=steps.append)
    generate(there, [a_chunk(0, PROMPT, seed=77, spans=(first.span(), GIVEN), has_turns=True, max_tokens=1)])
    assert steps[0].num_prefill_tokens == 1 + len(GIVEN.ids)
    assert there.num_missed_tokens == 0  # what was given was never computed, so it is not missed

    without = a_chunk(2, PROMPT, seed=77, stop_token_ids=(stop,))
    generate(here, [without])
    pool.free("0")
    pool.free(part_owner("0"))
    assert pool.stats().num_pinned_blocks == 0  # a response without turns is over at its stop


def test_what_a_tool_answered_is_drafted_where_a_sibling_repeats_it(folder: Path) -> None:
    pytest.importorskip("seer.drafting._index")
    from seer.drafting.grouped_drafter import GroupedDrafter

    quoting = a_chunk(1, PROMPT, max_tokens=40, group=5)
    plain = generate(an_engine(folder), [quoting])[1]
    observation = TokenSpan(plain.ids[6:36], (), 0, is_given=True)  # what the sibling will say
    accepted: dict[bool, int] = {}
    for is_given in (False, True):
        drafter = GroupedDrafter((), None)
        drafter.begin_run("a", "grouped", 0)
        engine = an_engine(folder, drafter=drafter, budget=always(8))
        first = generate(engine, [a_chunk(0, PROMPT, max_tokens=4, group=5)])[0]
        spans = (first.span(), observation) if is_given else (first.span(),)
        generate(engine, [a_chunk(0, PROMPT, max_tokens=2, group=5, spans=spans)])
        answer = generate(engine, [quoting])[1]
        assert (answer.ids, answer.logprobs) == (plain.ids, plain.logprobs)
        accepted[is_given] = answer.num_accepted
        drafter.close()
    assert accepted[True] - accepted[False] >= 15, accepted
