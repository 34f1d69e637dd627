# SPDX-License-Identifier: Apache-2.0
"""The request buffer: its moves, its refusals and its counts."""

from dataclasses import replace

import pytest

from builders import a_buffer, a_group, an_output
from seer.buffer import RequestState, request_seed
from seer.types import ChunkEnd, ChunkOutput, FinishReason, TokenSpan


def test_admitting_a_group_makes_its_requests_wait_with_the_first_as_probe() -> None:
    buffer = a_buffer(a_group(0, 3), a_group(1, 2))
    requests = list(buffer.requests())

    assert [request.id for request in requests] == [0, 1, 2, 3, 4]
    assert [request.is_probe for request in requests] == [True, False, False, True, False]
    assert buffer.num_waiting == 5
    assert not buffer.drained


def test_a_group_is_admitted_once() -> None:
    buffer = a_buffer(a_group(0))
    with pytest.raises(AssertionError, match="admitted before"):
        buffer.admit([a_group(0)], 0.0)


def test_a_request_waits_again_when_its_chunk_reaches_its_limit() -> None:
    buffer = a_buffer(a_group(max_tokens=100))
    request = buffer[0]
    chunk = buffer.start(request, 0, 30, False, 1.0)
    buffer.apply(an_output(chunk, 30, ChunkEnd.LIMIT), 2.0)

    assert request.state is RequestState.WAITING
    assert (request.num_generated, request.last_instance, request.instance) == (30, 0, None)
    assert buffer.start(request, 1, 70, True, 3.0).num_generated_tokens == 30
    assert request.num_migrations == 1
    buffer.check()


@pytest.mark.parametrize(
    ("tokens", "end", "finish_reason"),
    [(12, ChunkEnd.STOP, FinishReason.STOP), (100, ChunkEnd.LIMIT, FinishReason.LENGTH)],
)
def test_a_request_finishes_when_the_model_stops_or_its_own_limit_is_reached(
    tokens: int, end: ChunkEnd, finish_reason: FinishReason
) -> None:
    buffer = a_buffer(a_group(0, 1, max_tokens=100))
    chunk = buffer.start(buffer[0], 0, 100, False, 0.0)
    buffer.apply(an_output(chunk, tokens, end), 5.0)

    (result,) = buffer.take_complete_groups()
    assert (result.responses[0].finish_reason, result.responses[0].num_tokens) == (finish_reason, tokens)
    assert result.responses[0].finished_s == 5.0
    assert buffer.drained
    assert buffer.take_complete_groups() == []


def test_a_request_has_its_response_from_the_moment_it_ends_and_its_group_hands_out_the_same_one() -> None:
    buffer = a_buffer(a_group(3, 2), weights_version=4)
    request = buffer[0]
    chunk = buffer.start(request, 0, 50, False, 1.0)
    buffer.apply(ChunkOutput(0, chunk.attempt, 0, 2, TokenSpan([7, 8], [-0.1, -0.2], 4, [-0.3, -0.4])), 2.0)
    assert request.response is None
    buffer.apply(ChunkOutput(0, chunk.attempt, 0, 1, TokenSpan([9], [-0.5], 4, [-0.6]), ChunkEnd.STOP), 3.0)

    response = request.response
    assert response is not None
    assert (response.group, response.prompt_id, response.index, response.weights_version) == (3, "3", 0, 4)
    assert (response.token_ids, response.logprobs) == ([7, 8, 9], [-0.1, -0.2, -0.5])
    assert response.raw_logprobs == [-0.3, -0.4, -0.6]
    assert (response.seed, response.num_tokens) == (request.seed, 3)
    assert (response.queued_s, response.started_s, response.finished_s) == (0.0, 1.0, 3.0)
    buffer.cancel(buffer[1], 4.0)
    (result,) = buffer.take_complete_groups()
    assert result.responses[0] is response
    assert (result.group, result.prompt_id, result.is_complete) == (3, "3", False)


def test_a_response_without_raw_log_probabilities_for_every_token_has_none() -> None:
    buffer = a_buffer(a_group(0, 1))
    chunk = buffer.start(buffer[0], 0, 50, False, 0.0)
    buffer.apply(ChunkOutput(0, chunk.attempt, 0, 1, TokenSpan([7], [-0.1], 0, [-0.3])), 1.0)
    buffer.apply(ChunkOutput(0, chunk.attempt, 0, 1, TokenSpan([8], [-0.2], 0), ChunkEnd.STOP), 1.0)
    response = buffer[0].response
    assert response is not None
    assert response.raw_logprobs is None


def test_an_instance_that_leaves_out_log_probabilities_that_were_asked_for_is_refused() -> None:
    buffer = a_buffer(a_group(0, 1, max_tokens=9))
    chunk = buffer.start(buffer[0], 0, 9, False, 0.0)
    with pytest.raises(AssertionError, match="2 tokens with 0 log-probabilities"):
        buffer.apply(ChunkOutput(chunk.request, chunk.attempt, 0, 2, TokenSpan([3, 4], [], 0)), 1.0)


def test_a_response_whose_sampling_asks_for_no_log_probabilities_has_none_and_takes_none() -> None:
    plain = a_group(0, 1, max_tokens=9)
    buffer = a_buffer(replace(plain, sampling=replace(plain.sampling, logprobs=False)))
    chunk = buffer.start(buffer[0], 0, 9, False, 0.0)
    buffer.apply(ChunkOutput(chunk.request, chunk.attempt, 0, 2, TokenSpan([3, 4], [], 0)), 1.0)
    with pytest.raises(AssertionError, match="1 log-probabilities"):
        buffer.apply(ChunkOutput(chunk.request, chunk.attempt, 0, 1, TokenSpan([5], [-1.0], 0)), 1.0)
    last = TokenSpan([5], [], 0)
    buffer.apply(ChunkOutput(chunk.request, chunk.attempt, 0, 1, last, ChunkEnd.STOP), 2.0)
    response = buffer.take_complete_groups()[0].responses[0]
    assert (response.token_ids, response.logprobs, response.raw_logprobs) == ([3, 4, 5], [], None)


def test_outputs_of_a_superseded_attempt_are_ignored() -> None:
    buffer = a_buffer(a_group(max_tokens=100))
    request = buffer[0]
    old = buffer.start(request, 0, 50, False, 0.0)
    buffer.apply(an_output(old, 10), 1.0)
    buffer.lose(request)
    assert buffer.apply(an_output(old, 5, ChunkEnd.STOP), 2.0) is None  # while it waits

    new = buffer.start(request, 1, 50, False, 3.0)
    assert buffer.apply(an_output(old, 5, ChunkEnd.STOP), 4.0) is None  # while it runs elsewhere
    assert request.num_generated == 10
    buffer.apply(an_output(new, 50, ChunkEnd.LIMIT), 5.0)
    assert request.num_generated == 60
    buffer.check()


def test_a_lost_request_keeps_its_tokens_and_forgets_where_its_kv_was() -> None:
    buffer = a_buffer()
    request = buffer[0]
    chunk = buffer.start(request, 0, 50, False, 0.0)
    buffer.apply(an_output(chunk, 20), 1.0)
    buffer.lose(request)

    assert (request.state, request.num_generated, request.last_instance) == (RequestState.WAITING, 20, None)
    buffer.check()


def test_an_instance_that_generates_more_than_it_was_asked_for_is_refused() -> None:
    buffer = a_buffer()
    chunk = buffer.start(buffer[0], 0, 50, False, 0.0)
    with pytest.raises(AssertionError, match="51 tokens"):
        buffer.apply(an_output(chunk, 51), 1.0)


def test_illegal_moves_are_refused() -> None:
    buffer = a_buffer(a_group(max_tokens=100))
    request = buffer[0]
    with pytest.raises(AssertionError, match="cannot lose"):
        buffer.lose(request)
    with pytest.raises(AssertionError, match="chunk of 101"):
        buffer.start(request, 0, 101, False, 0.0)
    with pytest.raises(AssertionError, match="chunk of 0"):
        buffer.start(request, 0, 0, False, 0.0)
    buffer.start(request, 0, 100, False, 0.0)
    with pytest.raises(AssertionError, match="cannot start"):
        buffer.start(request, 0, 100, False, 0.0)


def test_a_terminal_state_is_never_left() -> None:
    buffer = a_buffer(a_group(0, 1))
    request = buffer[0]
    chunk = buffer.start(request, 0, 50, False, 0.0)
    buffer.apply(an_output(chunk, 5, ChunkEnd.STOP), 1.0)

    assert buffer.apply(an_output(chunk, 5, ChunkEnd.STOP), 2.0) is None
    buffer.cancel(request, 3.0)
    assert (request.finish_reason, request.num_generated) == (FinishReason.STOP, 5)
    with pytest.raises(AssertionError, match="has ended and cannot fail"):
        buffer.fail(request, "late", 4.0)
    with pytest.raises(AssertionError, match="cannot start"):
        buffer.start(request, 0, 1, False, 5.0)


def test_failing_and_cancelling_end_a_request_wherever_it_is() -> None:
    buffer = a_buffer(a_group(0, 3))
    buffer.start(buffer[0], 0, 50, False, 0.0)
    buffer.fail(buffer[0], "gone", 1.0)
    buffer.cancel(buffer[1], 2.0)
    buffer.start(buffer[2], 0, 50, False, 2.0)
    buffer.cancel(buffer[2], 3.0)

    assert [request.finish_reason for request in buffer.requests()] == [
        FinishReason.FAILED,
        FinishReason.CANCELLED,
        FinishReason.CANCELLED,
    ]
    assert buffer.drained
    assert len(buffer.take_complete_groups()) == 1
    buffer.check()


def test_tokens_of_another_weights_version_are_refused() -> None:
    buffer = a_buffer()
    chunk = buffer.start(buffer[0], 0, 50, False, 0.0)
    span = TokenSpan([1, 2], [-0.1, -0.2], weights_version=7)
    output = type(an_output(chunk, 2))(chunk.request, chunk.attempt, 0, 2, span=span)
    with pytest.raises(AssertionError, match="weights version 7"):
        buffer.apply(output, 1.0)


def test_check_finds_a_miscount() -> None:
    buffer = a_buffer()
    buffer.num_waiting += 1
    with pytest.raises(AssertionError, match="miscounted"):
        buffer.check()


def test_request_seeds_differ_within_and_between_groups_and_fit_64_bits() -> None:
    seeds = {request_seed(group, index) for group in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(("lease", "left"), [(400, 32), (64, 32), (20, 10), (1, 1)])
def test_a_lease_runs_low_when_few_tokens_are_left_of_it(lease: int, left: int) -> None:
    buffer = a_buffer(a_group(0, 1, max_tokens=1000))
    chunk = buffer.start(buffer[0], 0, lease, False, 0.0, is_lease=True)
    if lease > left:
        buffer.apply(an_output(chunk, lease - left - 1), 1.0)
        assert not buffer[0].runs_low
        buffer.apply(an_output(chunk, 1), 2.0)
    assert buffer[0].runs_low
    buffer.extend(buffer[0], 200)
    assert not buffer[0].runs_low
