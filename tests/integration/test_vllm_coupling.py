# SPDX-License-Identifier: Apache-2.0
"""Random requests in chunks, moved, parked, aborted and drafted for, against what plain vLLM generates in one piece.

Plain: the same engine, asked as any client of vLLM asks it, without what Seer's chunks carry. Greedy requests, and
those whose sampling leaves one token, must have the same tokens. On a CPU vLLM's noise begins anew with each chunk, so
the tokens of other requests are scored: each must have the log-probability that a plain forward pass gives it.
SEER_COUPLING_ROUNDS runs more of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from tokenizers import Tokenizer, decoders, models

from engines import a_chunk
from seer.engine.local.sampling import SampleRow, processed
from seer.engine.local.tiny import make_tiny_model
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig
from seer.types import Attempt, ChunkEnd, ChunkOutput, Sampling, TokenSpan
from seer.verification.verify import PlainModel
from vllm_engines import HEAD_DIM, LoopThread, needs_vllm
from vllm_pair import BLOCK_SIZE, Pair, running

pytestmark = [*needs_vllm, pytest.mark.timeout(600)]

ROUNDS = int(os.environ.get("SEER_COUPLING_ROUNDS", "8"))
FIRST_ROUND = int(os.environ.get("SEER_COUPLING_FIRST", "0"))
VOCABULARY, EOS = 128, 2
SEEDS = (0, 1, (1 << 63) - 1)
TOLERANCE = 1e-3
TIE = 1e-4
"""Between two likeliest tokens, or the share of kept tokens and `top_p`: nearer than this, rounding may decide."""


def letter(token: int) -> str:
    """The text of a token."""
    return chr(0x4E00 + token)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=3, head_dim=HEAD_DIM)
    letters = Tokenizer(models.WordLevel({letter(i): i for i in range(VOCABULARY)}, unk_token=letter(0)))
    letters.decoder = decoders.Fuse()
    letters.save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    from seer.engine.vllm.model_folder import read_folder

    config: dict[str, Any] = {
        "name": f"test-{uuid.uuid4().hex[:8]}",
        "block_bytes": read_folder(folder).block_bytes(BLOCK_SIZE, 4),
        "dram_bytes": 32 << 20,
    }
    thread = LoopThread()
    with LocalPool(LocalPoolConfig(populate=False, **config)) as pool:
        yield from running(Pair(folder, {"backend": "local", "populate": False, **config}, thread))
        pool.close(remove=True)
    thread.close()


@dataclass
class ARequest:
    """One request, and what becomes of it."""

    group: int
    prompt: list[int]
    seed: int
    sampling: Sampling
    spans: tuple[TokenSpan, ...] = ()
    end: ChunkOutput | None = None
    chunk_ends: list[int] = field(default_factory=list)
    """Generated tokens after each chunk."""

    @property
    def tokens(self) -> list[int]:
        return [token for span in self.spans for token in span.ids]

    @property
    def is_decided(self) -> bool:
        """Whether its sampling leaves one token in every place."""
        return self.sampling.temperature == 0 or self.sampling.top_k == 1 or self.sampling.top_p < 1e-3


def some_requests(pick: random.Random, max_model_len: int) -> list[ARequest]:
    """Groups of siblings; some have the same prompt as another group."""
    lengths = [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, pick.randrange(3, 90)]
    prompts = [[pick.randrange(3, VOCABULARY) for _ in range(pick.choice(lengths))] for _ in range(2)]
    requests = []
    for group in range(3):
        prompt = pick.choice(prompts)
        longest = pick.choice([1, 2, 40, 96, 96, 130, max_model_len - len(prompt)])
        sampling = Sampling(
            max_tokens=longest,
            temperature=pick.choice([0.0, 0.0, 0.0, 0.01, 0.7, 1.0, 2.0]),
            top_k=pick.choice([None, None, 1, 7, VOCABULARY, (1 << 31) - 1]),
            top_p=pick.choice([1.0, 1.0, 0.8, 1e-6]),
            min_tokens=min(longest, pick.choice([0, 0, 1, 20, 70])),
            stop_token_ids=tuple(pick.sample(range(VOCABULARY), pick.choice([0, 0, 1, 3]))),
            stop=tuple(letter(pick.randrange(VOCABULARY)) for _ in range(pick.choice([0, 0, 0, 1]))),
            ignore_eos=pick.random() < 0.7,
            logprobs=pick.random() < 0.7,
        )
        for _ in range(pick.choice([1, 2, 4])):
            requests.append(ARequest(group, prompt, pick.choice([*SEEDS, pick.getrandbits(63)]), sampling))
    return requests


async def in_pieces(pair: Pair, one: ARequest, pick: random.Random) -> None:
    """Run a request: in chunks of random lengths, each on a random instance, some of them parked or aborted."""
    number, attempt = pair.request(), 0
    while one.end is None:
        attempt += 1
        at = pick.randrange(2)
        left = one.sampling.max_tokens - len(one.tokens)
        most = min(left, pick.choice([1, 5, BLOCK_SIZE, 40, left]))
        asked = a_chunk(
            number,
            one.prompt,
            spans=one.spans,
            max_tokens=most,
            group=one.group,
            seed=one.seed,
            load_kv=pick.random() < 0.8,
        )
        instance = pair.instances[at]
        instance.submit(msgspec.structs.replace(asked, attempt=attempt, sampling=one.sampling))
        attempt_now = attempt

        def of(attempt: int = attempt_now) -> list[ChunkOutput]:
            return [o for o in pair.inbox.outputs if (o.request, o.attempt) == (number, attempt)]

        if pick.random() < 0.3:
            await pair.inbox.until(lambda of=of: bool(of()))  # type: ignore[misc]
            if pick.random() < 0.5:
                instance.park([Attempt(number, attempt)])
            else:
                instance.abort(number)
        await pair.inbox.until(lambda of=of: any(o.end for o in of()))  # type: ignore[misc]
        outputs = of()
        one.spans += tuple(o.span for o in outputs if o.span)
        one.chunk_ends.append(len(one.tokens))
        last = outputs[-1]
        assert last.end in (ChunkEnd.STOP, ChunkEnd.LIMIT, ChunkEnd.PARKED, ChunkEnd.ABORTED), last
        if last.end is ChunkEnd.STOP or len(one.tokens) >= one.sampling.max_tokens:
            one.end = last


async def plain_vllm(pair: Pair, one: ARequest) -> tuple[list[int], list[float]]:
    """Greedy, in one piece, as a client of vLLM asks for it; to the end that its stop tokens or its limit make."""
    from vllm import SamplingParams

    class WithItsOwnEnds(SamplingParams):
        """Plain vLLM would keep the model's end tokens out before `min_tokens`, also where they are ignored."""

        def update_from_generation_config(self, *_: Any, **__: Any) -> None:
            pass

    engine = pair.instances[0]._started()
    sampling = one.sampling
    ends = [*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])]
    params = (WithItsOwnEnds if sampling.ignore_eos else SamplingParams)(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=0.0,
        stop_token_ids=ends,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )
    prompt = {"prompt_token_ids": one.prompt, "cache_salt": uuid.uuid4().hex}
    *_, last = [output async for output in engine.generate(prompt, params, uuid.uuid4().hex)]
    (output,) = last.outputs
    tokens = list(output.token_ids)
    return tokens, [at[token].logprob for at, token in zip(output.logprobs, tokens, strict=True)]


def cut_at_stop_string(one: ARequest, tokens: list[int]) -> list[int]:
    """Up to the token that completes a stop string, where it may end: every token is one letter."""
    ends = {token for token in range(VOCABULARY) if letter(token) in one.sampling.stop}
    return next(
        (tokens[: at + 1] for at, token in enumerate(tokens) if token in ends and at >= one.sampling.min_tokens), tokens
    )


def assert_same(one: ARequest, model: PlainModel, plain: list[int], logprobs: list[float], where: str) -> None:
    expected = cut_at_stop_string(one, plain)
    differs = next((at for at, pair in enumerate(zip(one.tokens, expected, strict=False)) if pair[0] != pair[1]), None)
    if differs is not None:
        logits = model.logits([*one.prompt, *expected[:differs]], len(one.prompt) + differs - 1)[-1]
        first, second = logits[one.tokens[differs]], logits[expected[differs]]
        assert abs(float(first - second)) < TIE, (
            f"{where}: token {differs} is {one.tokens[differs]}, not {expected[differs]}"
        )
        return
    assert one.tokens == expected, f"{where}: {len(one.tokens)} tokens of {len(expected)}"
    raw = [value for span in one.spans for value in span.raw_logprobs or ()]
    if one.sampling.temperature == 0 and one.sampling.logprobs and not one.sampling.min_tokens:
        assert raw == pytest.approx(logprobs[: len(raw)], abs=TOLERANCE), where
        assert len(raw) == len(expected)


def assert_scored(one: ARequest, model: PlainModel, where: str) -> None:
    """Each token has the log-probability of the distribution that it was to be sampled from."""
    tokens, sampling = one.tokens, one.sampling
    logits = model.logits([*one.prompt, *tokens[:-1]], len(one.prompt) - 1)
    values = [value for span in one.spans for value in span.logprobs]
    ends = [*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])]
    wrong = {}
    for at, token in enumerate(tokens):
        row = logits[at].clone()
        if at < sampling.min_tokens:
            row[ends] = -float("inf")
        shares = (
            (sampling.top_p - TIE, sampling.top_p, min(1.0, sampling.top_p + TIE)) if sampling.top_p < 1 else (1.0,)
        )
        plain = [share_of(row, token, sampling, share) for share in shares]
        if not any(abs(values[at] - value) < TOLERANCE for value in plain):
            wrong[at] = (token, values[at], *plain)
    assert not wrong, f"{where}: tokens {tokens}, of which these have other log-probabilities than {wrong}"


def share_of(logits: Any, token: int, sampling: Sampling, top_p: float) -> float:
    like = Sampling(max_tokens=1, temperature=sampling.temperature, top_k=sampling.top_k, top_p=top_p)
    return float(processed(logits, SampleRow(sampling=like, seed=0, position=0)).log_softmax(0)[token])


def assert_ended_rightly(one: ARequest, where: str) -> None:
    assert one.end is not None
    tokens, sampling = one.tokens, one.sampling
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
    strings = {token for token in range(VOCABULARY) if letter(token) in sampling.stop}
    assert not ends.intersection(tokens[: sampling.min_tokens]), f"{where}: a stop token before min_tokens"
    late = tokens[sampling.min_tokens : -1]
    assert not (ends | strings).intersection(late), f"{where}: it went on after a stop"
    stops_at_last = len(tokens) > sampling.min_tokens and tokens[-1] in ends | strings
    assert (one.end.end is ChunkEnd.STOP) == stops_at_last, f"{where}: {one.end.end} after {tokens[-1]}"
    if not stops_at_last:
        assert len(tokens) == sampling.max_tokens, where
    if one.end.end is ChunkEnd.STOP and tokens[-1] in ends:
        assert one.end.stop_token == tokens[-1], where
    has_logprobs = [len(span.logprobs) == len(span.ids) for span in one.spans]
    assert has_logprobs == [sampling.logprobs] * len(one.spans) if sampling.temperature else True, where


@pytest.mark.parametrize("number", range(FIRST_ROUND, FIRST_ROUND + ROUNDS))
def test_requests_in_pieces_have_the_tokens_of_plain_vllm(pair: Pair, folder: Path, number: int) -> None:
    pick = random.Random(number)
    drafts = pick.choice(["grouped", "grouped", "own", "none"])
    requests = some_requests(pick, pair.instances[0].limits.max_model_len)
    seeds = [pick.getrandbits(32) for _ in requests]

    async def scenario() -> list[tuple[list[int], list[float]]]:
        await pair.begin(drafts)
        pair.inbox.outputs.clear()
        runs = zip(requests, seeds, strict=True)
        await asyncio.gather(*(in_pieces(pair, one, random.Random(seed)) for one, seed in runs))
        return list(await asyncio.gather(*(plain_vllm(pair, one) for one in requests)))

    plain = pair.thread.run(scenario())
    model = PlainModel(folder)
    for at, (one, (tokens, logprobs)) in enumerate(zip(requests, plain, strict=True)):
        pieces = f"prompt of {len(one.prompt)}, chunks {one.chunk_ends}, {one.sampling}"
        where = f"round {number}, request {at}, drafts {drafts}, {pieces}"
        assert_ended_rightly(one, where)
        if one.is_decided:
            assert_same(one, model, tokens, logprobs, where)
        elif one.sampling.logprobs:
            assert_scored(one, model, where)


def test_a_stop_token_may_come_right_after_min_tokens_also_after_a_draft(pair: Pair) -> None:
    # A chunk samples one token and then four drafts and one token at a step: its sixth token follows a draft.
    at_sixth, prompt = 5, [9, 10, 11, 12, 13]

    async def scenario() -> list[tuple[list[int], list[int]]]:
        await pair.begin("grouped")
        sampling = {"temperature": 0.0, "ignore_eos": True}
        whole = await pair.chunk(0, pair.request(), (), max_tokens=100, prompt=prompt, sampling=sampling)
        spans = [o.span for o in whole if o.span]
        free = [token for span in spans for token in span.ids]
        firsts = [at for at in range(8, 100) if free[at] not in free[:at]]
        found = []
        for at in firsts:
            start = at - at_sixth
            before = (TokenSpan(free[:start], [0.0] * start, 0),)
            stopping = sampling | {"stop_token_ids": (free[at],), "min_tokens": at}
            outputs = await pair.chunk(0, pair.request(), before, max_tokens=20, prompt=prompt, sampling=stopping)
            found.append((free[start : at + 1], [token for o in outputs if o.span for token in o.span.ids]))
        return found

    before = pair.instances[0].view().num_accepted
    found = pair.thread.run(scenario())
    assert found, "no token of the response is new: another prompt"
    assert pair.instances[0].view().num_accepted > before, "nothing was drafted"
    for expected, generated in found:
        assert generated == expected


def test_a_chunk_whose_sampling_vllm_refuses_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from seer.engine.vllm import instance

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("temperature must be in [0, 2]")

    monkeypatch.setattr(instance, "sampling_params", refuse)

    async def scenario() -> list[ChunkOutput]:
        await pair.begin("none")
        return await pair.chunk(0, pair.request(), (), max_tokens=4)

    (output,) = pair.thread.run(scenario())
    assert output.end is ChunkEnd.FAILED
    assert "temperature must be in" in str(output.error)
