# SPDX-License-Identifier: Apache-2.0
"""Whatever the settings of sampling, drafts, chunks and little memory change no token and no log-probability."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engines import Generated, a_chunk, always, an_engine, generate, knowing, random_trees, tokens_of
from seer.engine.local.tiny import make_tiny_model
from seer.types import ChunkEnd

NUM_REQUESTS, NUM_TOKENS = 48, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=9)


def settings_of(request: int) -> dict[str, Any]:
    """Settings at their edges, some of them together."""
    dice = random.Random(request)
    return {
        "temperature": dice.choice([0.0, 0.6, 1.0, 1.7]),
        "top_k": dice.choice([None, None, 1, 5, 128, 1000]),
        "top_p": dice.choice([1.0, 1.0, 0.9, 1e-6]),
        "min_p": dice.choice([0.0, 0.0, 0.05, 1.0]),
        "min_tokens": dice.choice([0, 1, 7, 20, NUM_TOKENS]),
        "stop_token_ids": tuple(dice.sample(range(128), dice.choice([0, 4, 30, 100]))),
        "ignore_eos": dice.random() < 0.5,
    }


def a_part(request: int, before: Generated, most: int) -> Any:
    spans = (before.span(),) if before.ids else ()
    left = min(most, NUM_TOKENS - len(before.ids))
    prompt = [3 + request, *range(20, 20 + request % 9)]
    return a_chunk(request, prompt, max_tokens=left, spans=spans, **settings_of(request))


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[int, Generated]:
    """Every request alone, one token at a time: the definition of what is right."""
    answers: dict[int, Generated] = {}
    for request in range(NUM_REQUESTS):
        answers |= generate(an_engine(folder, max_num_seqs=1), [a_part(request, Generated(), NUM_TOKENS)])
    return answers


def test_the_settings_hold_where_a_request_runs_alone(plain: dict[int, Generated]) -> None:
    num_stopped = 0
    for request, answer in plain.items():
        settings = settings_of(request)
        ends = {*settings["stop_token_ids"], *(() if settings["ignore_eos"] else (2,))}
        at = next((i for i, token in enumerate(answer.ids) if token in ends), None)
        num_stopped += at is not None
        assert at is None or at >= settings["min_tokens"]
        assert len(answer.ids) == (NUM_TOKENS if at is None else at + 1)
        assert answer.end is (ChunkEnd.LIMIT if at is None else ChunkEnd.STOP)
        assert answer.stop_token == (None if at is None else answer.ids[at])
        if settings["temperature"] == 0 or 1 in (settings["top_k"], settings["min_p"]) or settings["top_p"] < 1e-3:
            assert max(map(abs, answer.logprobs)) < 1e-5, "only one token was left to sample from"
    assert NUM_REQUESTS // 4 < num_stopped < NUM_REQUESTS


@pytest.mark.parametrize("most", [NUM_TOKENS, 9])
@pytest.mark.parametrize("drafts", ["none", "known", "random"])
def test_drafts_chunks_and_little_memory_change_nothing(
    folder: Path, plain: dict[int, Generated], drafts: str, most: int
) -> None:
    options: dict[str, Any] = {}
    if drafts != "none":
        drafter = knowing(tokens_of(plain), tree=True) if drafts == "known" else random_trees(1, 128)
        options = {"drafter": drafter, "budget": always(7)}
    engine = an_engine(folder, kv_blocks=24, max_num_seqs=6, max_step_tokens=50, **options)
    done = {request: Generated() for request in plain}
    left = set(done)
    while left:
        for request, part in generate(engine, [a_part(one, done[one], most) for one in sorted(left)]).items():
            answer = done[request]
            answer.ids += part.ids
            answer.logprobs += part.logprobs
            answer.raw_logprobs += part.raw_logprobs
            answer.end, answer.stop_token = part.end, part.stop_token
            if part.end is ChunkEnd.STOP or len(answer.ids) == NUM_TOKENS:
                left.remove(request)
    for request, answer in done.items():
        alone = plain[request]
        assert (answer.ids, answer.end, answer.stop_token) == (alone.ids, alone.end, alone.stop_token), request
        assert (answer.logprobs, answer.raw_logprobs) == (alone.logprobs, alone.raw_logprobs), request
    if drafts == "none" and most == NUM_TOKENS:
        assert engine.scheduler.num_parked > 0
