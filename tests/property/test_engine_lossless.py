# SPDX-License-Identifier: Apache-2.0
"""Nothing the engine does to be fast changes a token: batches, chunks, migration, linear and tree drafts.

On a CPU in fp32 the claim is stronger than the tokens: log-probabilities are equal to the bit.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engines import Generated, a_chunk, always, an_engine, generate, knowing, random_trees, tokens_of
from seer.engine.local.tiny import make_tiny_model
from seer.types import Chunk, TokenSpan

FAMILIES = ("llama", "qwen2", "qwen3")
NUM_REQUESTS, NUM_TOKENS = 40, 90


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), request.param, seed=7)


def prompts(seed: int = 3) -> list[list[int]]:
    dice = random.Random(seed)
    shared = [dice.randrange(3, 128) for _ in range(30)]
    return [[*shared[: dice.randint(1, 30)], dice.randrange(3, 128)] for _ in range(NUM_REQUESTS)]


def chunks(max_tokens: int = NUM_TOKENS) -> list[Chunk]:
    """Half of them greedy, half sampled."""
    return [a_chunk(i, p, max_tokens=max_tokens, temperature=float(i % 2)) for i, p in enumerate(prompts())]


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[int, Generated]:
    """Every request alone, one token at a time: the definition of what is right."""
    answers: dict[int, Generated] = {}
    for chunk in chunks():
        engine = an_engine(folder, max_num_seqs=1, max_step_tokens=64)
        answers |= generate(engine, [chunk])
    return answers


def assert_same(answers: dict[int, Generated], plain: dict[int, Generated]) -> None:
    assert tokens_of(answers) == tokens_of(plain)
    for request, answer in answers.items():
        assert answer.logprobs == plain[request].logprobs, f"request {request}"
        assert answer.raw_logprobs == plain[request].raw_logprobs, f"request {request}"


def test_batch_neighbours_change_nothing(folder: Path, plain: dict[int, Generated]) -> None:
    arrive = {i: (i * 7) % 60 for i in range(NUM_REQUESTS)}
    engine = an_engine(folder, max_num_seqs=8, max_step_tokens=23)
    assert_same(generate(engine, chunks(), arrive=arrive), plain)


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32])
def test_block_size_changes_nothing(folder: Path, plain: dict[int, Generated], block_size: int) -> None:
    engine = an_engine(folder, block_size=block_size, kv_blocks=2048 // block_size, max_num_seqs=12)
    assert_same(generate(engine, chunks()), plain)


@pytest.mark.parametrize("max_draft", [1, 3, 8, 20])
@pytest.mark.parametrize("tree", [False, True])
def test_drafts_change_nothing(folder: Path, plain: dict[int, Generated], tree: bool, max_draft: int) -> None:
    drafter = knowing(tokens_of(plain), tree=tree)
    engine = an_engine(folder, max_num_seqs=6, drafter=drafter, budget=always(max_draft))
    answers = generate(engine, chunks())
    assert_same(answers, plain)
    assert drafter.observed == tokens_of(plain)
    assert sum(a.num_accepted for a in answers.values()) > NUM_REQUESTS * NUM_TOKENS // 5
    assert sum(a.num_drafted for a in answers.values()) >= sum(a.num_accepted for a in answers.values())


def test_random_drafts_change_nothing(folder: Path, plain: dict[int, Generated]) -> None:
    engine = an_engine(folder, max_num_seqs=6, drafter=random_trees(5, 128), budget=always(9))
    assert_same(generate(engine, chunks()), plain)


def test_chunking_changes_nothing(folder: Path, plain: dict[int, Generated]) -> None:
    """Each request in chunks of random size, each chunk on one of two engines."""
    dice = random.Random(11)
    engines = [
        an_engine(folder, max_num_seqs=5, drafter=random_trees(1, 128), budget=always(4)),
        an_engine(folder, max_num_seqs=3, block_size=8),
    ]
    done: dict[int, tuple[tuple[TokenSpan, ...], int]] = dict.fromkeys(range(NUM_REQUESTS), ((), 0))
    while any(count < NUM_TOKENS for _, count in done.values()):
        for engine in engines:
            wave = [
                a_chunk(
                    i,
                    prompts()[i],
                    max_tokens=min(dice.randint(1, 40), NUM_TOKENS - count),
                    spans=spans,
                    temperature=float(i % 2),
                )
                for i, (spans, count) in done.items()
                if count < NUM_TOKENS and dice.random() < 0.5
            ]
            for request, answer in generate(engine, wave).items():
                spans, count = done[request]
                done[request] = ((*spans, answer.span()), count + len(answer.ids))
    for request, (spans, _) in done.items():
        assert [token for span in spans for token in span.ids] == plain[request].ids
        assert [value for span in spans for value in span.logprobs] == plain[request].logprobs
