# SPDX-License-Identifier: Apache-2.0
"""An engine that runs out of blocks parks the chunk that entered last: nothing is computed twice, no token changes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engines import a_chunk, always, an_engine, generate, random_trees, tokens_of
from pools import a_local_pool
from seer.engine.local.cache import block_bytes
from seer.engine.local.model_config import read_config
from seer.engine.local.parking import save
from seer.engine.local.tiny import make_tiny_model
from seer.kvpool.none import NonePool
from seer.speculation.step_report import StepReport
from seer.types import Attempt, ChunkEnd, Lease

PROMPTS = [[20 + i] * (3 + 2 * i) for i in range(7)]
NUM_TOKENS, BLOCK_SIZE = 60, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=5)


@pytest.mark.parametrize("has_pool", [False, True])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_nothing_is_computed_twice_for_lack_of_memory(
    folder: Path, tmp_path: Path, has_pool: bool, has_drafts: bool
) -> None:
    chunks = [a_chunk(i, prompt, max_tokens=NUM_TOKENS, group=i) for i, prompt in enumerate(PROMPTS)]
    roomy = generate(an_engine(folder, block_size=BLOCK_SIZE), chunks)
    steps: list[StepReport] = []
    size = block_bytes(read_config(folder), BLOCK_SIZE, torch.float32)
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"drafter": random_trees(2, 128), "budget": always(3)} if has_drafts else {}
        if has_pool:
            options["pool"] = stack.enter_context(
                a_local_pool(tmp_path, block_bytes=size, dram_blocks=256, ssd_blocks=64)
            )
        tight = an_engine(folder, block_size=BLOCK_SIZE, kv_blocks=40, on_step=steps.append, **options)
        answers = generate(tight, chunks)
    assert tokens_of(answers) == tokens_of(roomy)
    assert tight.scheduler.num_parked > 0
    assert max(step.num_running for step in steps) >= 4  # of 40 blocks, a whole request takes up to 19
    num_computed = sum(round(step.num_batched_tokens * step.num_steps) - step.num_drafted for step in steps)
    num_accepted = sum(step.num_accepted for step in steps)
    assert num_computed + num_accepted == sum(len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS)


class TakesAll(NonePool):
    """A pool that takes every block and has dropped it when it is asked."""

    def put_now(self, keys: Any, buffers: Any, owners: Any = None) -> list[bool]:
        return [True] * len(keys)


def test_what_the_pool_has_dropped_since_is_computed_and_not_taken_from_later_blocks(folder: Path) -> None:
    chunks = [a_chunk(i, prompt, max_tokens=NUM_TOKENS, group=i) for i, prompt in enumerate(PROMPTS)]
    roomy = generate(an_engine(folder, block_size=BLOCK_SIZE), chunks)
    tight = an_engine(folder, block_size=BLOCK_SIZE, kv_blocks=40, pool=TakesAll())
    answers = generate(tight, chunks)
    assert tight.scheduler.num_parked > 0
    assert {i: (one.ids, one.logprobs) for i, one in answers.items()} == {
        i: (one.ids, one.logprobs) for i, one in roomy.items()
    }


def test_only_blocks_that_the_pool_does_not_have_are_copied(folder: Path) -> None:
    for pool, num_pooled in ((TakesAll(), 3), (None, 0)):
        engine = an_engine(folder, block_size=BLOCK_SIZE, pool=pool)
        engine.add(a_chunk(0, [20] * 14, max_tokens=NUM_TOKENS))
        with torch.inference_mode():
            engine.step()
        (active,) = engine.scheduler.running
        save(active, engine.scheduler.cache)
        assert active.saved is not None
        assert (active.saved.first, active.saved.num_computed) == (num_pooled, 14)
        assert len(active.saved.rows) == 4 - num_pooled


def test_a_chunk_that_is_parked_in_its_context_leaves_no_part(folder: Path, tmp_path: Path) -> None:
    """Nobody would look for it, nor free it."""
    size = block_bytes(read_config(folder), BLOCK_SIZE, torch.float32)
    with a_local_pool(tmp_path, block_bytes=size, dram_blocks=32, ssd_blocks=0) as pool:
        engine = an_engine(folder, block_size=BLOCK_SIZE, max_step_tokens=10, pool=pool)
        engine.add(a_chunk(0, [20] * 30, max_tokens=NUM_TOKENS))
        with torch.inference_mode():
            engine.step()
            (output,) = engine.park([Attempt(0, 1)])
        assert (output.end, output.num_tokens) == (ChunkEnd.PARKED, 0)
        assert (pool.stats().num_blocks, engine.scheduler.blocks.num_cached) == (2, 2)


def test_a_lease_is_extended_and_parked_between_steps(folder: Path) -> None:
    whole = generate(an_engine(folder), [a_chunk(0, PROMPTS[0], max_tokens=40)])[0]
    engine = an_engine(folder, stream_tokens=1)
    engine.add(a_chunk(0, PROMPTS[0], max_tokens=10))
    outputs = []
    with torch.inference_mode():
        outputs += engine.step()
        engine.extend([Lease(0, 1, 30), Lease(0, 1, 12), Lease(0, 2, 99)])
        for _ in range(14):
            outputs += engine.step()
        outputs += engine.park([Attempt(0, 2), Attempt(0, 1), Attempt(9, 1)])
        engine.extend([Lease(0, 1, 35)])  # too late
        while engine.busy:
            outputs += engine.step()
    assert [output.end for output in outputs if output.end] == [ChunkEnd.PARKED]
    ids = [token for output in outputs if output.span for token in output.span.ids]
    assert 10 < len(ids) < 30
    assert (len(PROMPTS[0]) + len(ids) - 1) % engine.scheduler.cache.block_size == 0  # all of its KV is kept
    assert ids == whole.ids[: len(ids)]
    assert not engine.busy
