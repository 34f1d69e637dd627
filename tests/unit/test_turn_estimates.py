# SPDX-License-Identifier: Apache-2.0
"""What conversations show of their group: turns, tokens per turn, tool times; and what that says of the others."""

from __future__ import annotations

import pytest

from builders import a_group, requests_of
from seer.buffer import Request
from seer.context import Context
from seer.scheduling.memory_or_slot import MemoryOrSlotOrdering
from seer.types import Turn


def converse(request: Request, num_turns: int, *, tokens: int = 10, tool_s: float = 2.0, token_s: float = 0.1) -> None:
    """Give a request so many turns of so many tokens, each followed by a tool's answer of five tokens."""
    now_s = 0.0
    for _ in range(num_turns):
        start = request.num_generated + request.num_given
        request.turns.append(Turn("generated", start, start + tokens, now_s, now_s := now_s + tokens * token_s))
        request.turns.append(Turn("given", start + tokens, start + tokens + 5, now_s, now_s := now_s + tool_s))
        request.num_generated += tokens
        request.num_given += 5


def test_a_group_shows_its_turns_and_their_times_with_its_first_finish() -> None:
    context = Context()
    first, second, third, _ = requests_of(a_group(1))
    assert context.turns.of(first.group) is None
    converse(first, 3)
    context.observe_finished(first)
    assert context.turns.of(first.group) == pytest.approx((3, 10.0, 2.0, 0.1))
    converse(second, 5, tokens=20, tool_s=4.0)
    context.observe_finished(second)
    seen = context.turns.of(first.group)
    assert seen == pytest.approx((5, (30 + 100) / 8, (6 + 20) / 8, 0.1))
    assert context.turns.remaining_wait_tokens(third) == pytest.approx(5 * 3.25 / 0.1)
    context.forget(1)
    assert context.turns.of(first.group) is None


def test_what_remains_falls_with_every_turn_and_is_never_negative() -> None:
    context = Context()
    first, second, *_ = requests_of(a_group())
    converse(first, 3, tool_s=1.0, token_s=0.1)
    context.observe_finished(first)
    found = [context.turns.remaining_wait_tokens(second)]
    for _ in range(5):
        converse(second, 1)
        found.append(context.turns.remaining_wait_tokens(second))
    assert found == [pytest.approx(value) for value in (30.0, 20.0, 10.0, 0.0, 0.0, 0.0)]


def test_turns_of_an_interrupted_run_have_no_times_and_teach_their_number() -> None:
    context = Context()
    first, second, *_ = requests_of(a_group())
    first.turns = [Turn("generated", 0, 8, None, None), Turn("given", 8, 9, None, None)]
    first.num_generated = 8
    context.observe_finished(first)
    assert context.turns.of(first.group) == (1, 8.0, 0.0, 0.0)
    assert context.turns.remaining_wait_tokens(second) == 0.0


def test_responses_without_turns_teach_nothing_of_them() -> None:
    context = Context()
    first, second, *_ = requests_of(a_group())
    first.num_generated = 8
    context.observe_finished(first)
    assert context.turns.of(first.group) is None
    assert context.turns.remaining_wait_tokens(second) == 0.0


@pytest.mark.parametrize("memory_is_scarce", [True, False])
def test_of_groups_of_equal_length_the_one_with_more_to_wait_for_runs_first(memory_is_scarce: bool) -> None:
    context = Context()
    quick, slow = a_group(0, 2, max_tokens=100_000), a_group(1, 2, max_tokens=100_000)
    first_quick, second_quick, first_slow, second_slow = requests_of(quick, slow)
    ordering = MemoryOrSlotOrdering(context)
    ordering.memory_is_scarce = memory_is_scarce
    ordering.admit([second_quick, second_slow])
    assert ordering.peek() is second_quick  # nothing is known, and its group came first
    for request, tool_s in ((first_quick, 0.1), (first_slow, 30.0)):
        converse(request, 4, tool_s=tool_s)
        context.observe_finished(request)
        ordering.finished(request)
    assert ordering.pop() is second_slow
    assert ordering.pop() is second_quick


def test_waiting_siblings_are_ranked_again_when_only_their_turns_look_different() -> None:
    context = Context()
    one, other = a_group(0, 3, max_tokens=100_000), a_group(1, 2, max_tokens=100_000)
    first, second, third, first_other, second_other = requests_of(one, other)
    ordering = MemoryOrSlotOrdering(context)
    ordering.admit([third, second_other])
    for request, tool_s in ((first, 1.0), (first_other, 2.0)):
        converse(request, 4, tool_s=tool_s)
        context.observe_finished(request)
        ordering.finished(request)
    assert ordering.peek() is second_other
    converse(second, 4, tool_s=60.0)  # as long as its sibling, with slower tools
    context.observe_finished(second)
    ordering.finished(second)
    assert ordering.peek() is third
