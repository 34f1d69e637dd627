# SPDX-License-Identifier: Apache-2.0
"""Chunks as vLLM's sampling parameters: limits count from the response's first token, not from the chunk's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from engines import a_chunk
from seer.errors import NoProbability
from seer.types import ChunkEnd, TokenSpan
from vllm_engines import needs_vllm

pytestmark = needs_vllm

VOCAB_SIZE = 128
GENERATED = (TokenSpan([7, 8, 9], [0.0] * 3, 0),)


def params_of(chunk: Any, eos: tuple[int, ...] = (2,), *, noise_by_position: bool = False) -> Any:
    from seer.engine.vllm.chunks import request_facts, sampling_params

    return sampling_params(chunk, eos, request_facts(chunk, "m", "r", "none"), noise_by_position=noise_by_position)


def test_min_tokens_counts_the_tokens_of_earlier_chunks() -> None:
    for spans, expected in (((), 5), (GENERATED, 2), (GENERATED * 2, 0)):
        assert params_of(a_chunk(0, [1], max_tokens=20, spans=spans, min_tokens=5)).min_tokens == expected
    assert params_of(a_chunk(0, [1], max_tokens=4, min_tokens=9)).min_tokens == 4, "a chunk shorter than what is left"


def test_end_tokens_stop_unless_ignored_and_stop_tokens_always() -> None:
    stops = {
        ignore: set(params_of(a_chunk(0, [1], ignore_eos=ignore, stop_token_ids=(5,))).stop_token_ids)
        for ignore in (False, True)
    }
    assert stops == {False: {2, 5}, True: {5}}


def test_seeds_differ_between_chunks_and_repeat_between_runs() -> None:
    def seed(spans: tuple[TokenSpan, ...], **changes: Any) -> int | None:
        found: int | None = params_of(a_chunk(0, [1], spans=spans, **changes)).seed
        return found

    assert seed(()) == seed(())
    assert len({seed(()), seed(GENERATED), seed(GENERATED * 2), seed((), seed=4)}) == 4
    assert seed((), temperature=0.0) is None


def test_where_noise_goes_by_position_every_chunk_has_the_seed_of_its_request() -> None:
    for spans in ((), GENERATED, GENERATED * 2):
        assert params_of(a_chunk(0, [1], spans=spans, seed=4), noise_by_position=True).seed == 4
    assert params_of(a_chunk(0, [1], seed=4, temperature=0.0), noise_by_position=True).seed is None


def flat(ids: list[int], values: list[float]) -> Any:
    """What vLLM's front end gathers: the sampled token of each position."""
    from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs

    gathered = create_sample_logprobs(flat_logprobs=True)
    for token, value in zip(ids, values, strict=True):
        append_logprobs_for_next_position(gathered, [token], [value], [None], 1, 0)
    return gathered


def span_of(chunk: Any, ids: Sequence[int] = (3,), logprobs: Any = None) -> TokenSpan | None:
    from seer.engine.vllm.chunks import token_span

    if logprobs is None:
        logprobs = flat([3], [-1.5])
    return token_span(chunk, 0, SimpleNamespace(token_ids=ids, logprobs=logprobs), VOCAB_SIZE)  # type: ignore[arg-type]


def test_the_models_own_log_probability_is_reported_where_vllm_gives_it() -> None:
    assert span_of(a_chunk(0, [1])) == TokenSpan([3], [-1.5], 0, [-1.5])
    assert span_of(a_chunk(0, [1], temperature=0.7)) == TokenSpan([3], [-1.5], 0, None)
    assert span_of(a_chunk(0, [1], top_k=5)) == TokenSpan([3], [-1.5], 0, None)
    assert span_of(a_chunk(0, [1], temperature=0.0)) == TokenSpan([3], [0.0], 0, [-1.5])
    # Stop tokens were cut from the distribution.
    assert span_of(a_chunk(0, [1], min_tokens=2)) == TokenSpan([3], [-1.5], 0, None)


def test_each_token_of_an_output_comes_with_its_own_log_probability() -> None:
    ids, values = [3, 9, 3, 4, 3], [-1.5, -0.25, -2.0, -0.125, -3.5]
    gathered, chunk = flat(ids, values), a_chunk(0, [1])
    assert span_of(chunk, ids, gathered) == TokenSpan(ids, values, 0, values)
    assert span_of(chunk, ids[-3:], gathered[-3:]) == TokenSpan(ids[-3:], values[-3:], 0, values[-3:]), "the newest"
    merged = gathered[-3:]
    merged.extend(gathered[:2])  # vLLM merges outputs that were not read yet
    expected = TokenSpan(ids[-3:] + ids[:2], values[-3:] + values[:2], 0)
    assert span_of(a_chunk(0, [1], top_k=5), [*ids[-3:], *ids[:2]], merged) == expected
    # vLLM 0.26 hands everything gathered so far to an output without tokens.
    assert span_of(chunk, [], gathered) is None
    assert span_of(chunk, [], flat([], [])) is None


def test_log_probabilities_of_other_tokens_are_refused() -> None:
    for ids, gathered in (([3, 9], flat([3], [-1.5])), ([9], flat([3], [-1.5])), ([3], flat([3, 3], [-1.5, -1.0]))):
        with pytest.raises(AssertionError, match="other tokens"):
            span_of(a_chunk(0, [1]), ids, gathered)
    with pytest.raises(AssertionError, match="flat"):
        span_of(a_chunk(0, [1]), [3], [{3: SimpleNamespace(logprob=-1.5)}])


@pytest.mark.parametrize(("token", "logprob"), [(3, math.nan), (3, -math.inf), (-1, -1.0), (VOCAB_SIZE, -1.0)])
def test_a_token_without_a_probability_is_refused_by_request_and_position(token: int, logprob: float) -> None:
    with pytest.raises(NoProbability, match=r"request 8, position 4: "):  # two of the prompt, two before it
        span_of(a_chunk(8, [1, 2]), [5, 6, token], flat([5, 6, token], [-1.0, -1.0, logprob]))


def test_a_chunk_that_asks_for_no_log_probabilities_gets_none_whether_or_not_they_come() -> None:
    chunk = a_chunk(0, [1], logprobs=False)
    for gathered in (flat([], []), flat([3, 9], [-1.5, -1.0]), flat([9], [-1.0])):
        assert span_of(chunk, [3, 9], gathered) == TokenSpan([3, 9], [], 0)


@pytest.mark.parametrize("gathered", [[-1.0, -1.0, math.nan], [math.nan]])
def test_a_log_probability_that_is_not_finite_is_refused_though_none_was_asked_for(gathered: list[float]) -> None:
    with pytest.raises(NoProbability, match=r"request 8, position 4: "):
        span_of(a_chunk(8, [1, 2], logprobs=False), [5, 6, 7], flat([5, 6, 7][-len(gathered) :], gathered))


def test_log_probabilities_are_requested_flat_and_the_scheduler_is_told_who_wants_them() -> None:
    from seer.engine.vllm.chunks import request_facts

    params = params_of(a_chunk(0, [1]))
    assert (params.logprobs, params.flat_logprobs) == (0, True)
    for wanted in (True, False):
        assert request_facts(a_chunk(0, [1], logprobs=wanted), "m", "r", "none").logprobs is wanted


def test_each_finish_reason_has_its_end() -> None:
    from seer.engine.vllm.chunks import chunk_end

    def end(reason: str | None, stop: Any = None) -> Any:
        return chunk_end(SimpleNamespace(finish_reason=reason, stop_reason=stop))  # type: ignore[arg-type]

    assert end(None) == (None, None, None)
    assert end("stop", 5) == (ChunkEnd.STOP, 5, None)
    assert end("length") == (ChunkEnd.LIMIT, None, None)
    assert end("abort") == (ChunkEnd.ABORTED, None, None)
    assert end("error")[0] is ChunkEnd.FAILED


def test_min_p_passes_beside_drafts_and_reaches_the_engine_as_vllms_own_parameters() -> None:
    import msgspec
    from vllm import SamplingParams

    params = params_of(a_chunk(0, [1], min_p=0.1))
    params._validate_spec_decode(object())
    with pytest.raises(Exception, match="min_p"):  # a ValueError in 0.26, a class of vLLM's own in 0.32
        SamplingParams(min_p=0.1)._validate_spec_decode(object())  # type: ignore[arg-type]
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert (arrived.min_p, arrived.extra_args) == (0.1, params.extra_args)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_keeps_out_the_tokens_that_end_a_response_and_no_others(ignore_eos: bool) -> None:
    params = params_of(a_chunk(0, [1], min_tokens=4, stop_token_ids=(9,), ignore_eos=ignore_eos))
    params.update_from_generation_config({"eos_token_id": [2, 3]}, 2)  # as vLLM's front end does
    assert params.all_stop_token_ids == ({9} if ignore_eos else {2, 9})


def test_what_a_chunk_carries_is_read_again_as_it_was() -> None:
    from seer.engine.vllm.chunk_facts import read_facts
    from seer.engine.vllm.chunks import request_facts, sampling_params

    chunk = a_chunk(3, [1, 2, 3], spans=GENERATED, max_tokens=8, group=5)
    for lease in (None, 8):
        facts = request_facts(chunk, "0a" * 16, "0b" * 8, "grouped", [1, 2], lease=lease)
        params = sampling_params(chunk, (2,), facts, noise_by_position=True)
        assert read_facts(params, chunk.num_context_tokens) == facts
        assert params.max_tokens == (8 if lease is None else facts.max_left)
