# SPDX-License-Identifier: Apache-2.0
"""Length estimates, as the paper makes them."""

from builders import a_context, a_group, requests_of
from seer.context import Context


def test_a_group_is_taken_to_be_as_long_as_it_may_be_until_a_request_finishes() -> None:
    context = a_context({1: 300})
    assert context.expected_tokens(a_group(0, max_tokens=1000)) == 1000
    assert not context.knows(a_group(0))
    assert context.expected_tokens(a_group(1, max_tokens=1000)) == 300
    assert context.knows(a_group(1))


def test_the_estimate_is_the_longest_finished_request_and_never_falls() -> None:
    context = Context()
    group = a_group(0, 3)
    for request, length in zip(requests_of(group), (200, 500, 100), strict=True):
        request.num_generated = length
        context.observe_finished(request)
    assert context.expected_tokens(group) == 500


def test_a_prior_stands_in_for_the_bound_and_yields_to_evidence() -> None:
    context = Context(length_hints={"prompt": 400, "long": 5000})
    known, unknown = a_group(0, key="prompt"), a_group(1, key="other")
    assert context.expected_tokens(known) == 400
    assert context.expected_tokens(unknown) == 1000
    assert context.expected_tokens(a_group(2, key="long")) == 1000  # never above what it may generate

    request = requests_of(known)[0]
    request.num_generated = 50
    context.observe_finished(request)
    assert context.expected_tokens(known) == 50
    assert context.as_length_hints({0: known}) == {"prompt": 50}


def test_service_adds_up_by_group() -> None:
    context = Context()
    first, second = requests_of(a_group(0, 2))
    context.grant(first, 100)
    context.grant(second, 50)
    assert context.service_tokens(first.group) == 150
    assert context.service_tokens(a_group(9)) == 0
