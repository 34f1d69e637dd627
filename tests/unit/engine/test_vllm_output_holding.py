# SPDX-License-Identifier: Apache-2.0
"""Tokens held back in vLLM's engine: all of them leave, in order, with their log-probabilities."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")

from vllm_engines import needs_vllm

pytestmark = needs_vllm


def an_output(request: str, tokens: list[int], **fields: Any) -> Any:
    import numpy as np
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    column = np.array(tokens, dtype=np.int32).reshape(-1, 1)
    logprobs = LogprobsLists(column, -column.astype(np.float32), column[:, 0] + 1)
    return EngineCoreOutput(request, list(tokens), logprobs, **fields)


def content(output: Any) -> tuple[str, list[int]]:
    """Request and tokens; every token's log-probability and rank must be its own."""
    ids, logprobs, ranks, _ = output.new_logprobs
    tokens = output.new_token_ids
    assert ids.tolist() == [[token] for token in tokens]
    assert logprobs.tolist() == [[-float(token)] for token in tokens]
    assert ranks.tolist() == [token + 1 for token in tokens]
    return output.request_id, tokens


def a_holding(max_tokens: int) -> Any:
    from seer.engine.vllm.output_holding import OutputHolding

    return OutputHolding(max_tokens)


def finish() -> Any:
    from vllm.v1.engine import FinishReason

    return FinishReason.LENGTH


def test_the_first_token_leaves_at_once_and_later_ones_together() -> None:
    holding = a_holding(4)
    left = [[content(due) for due in holding.pass_on([an_output("a", [token])])] for token in range(10)]
    assert left == [[("a", [0])], [], [], [], [("a", [1, 2, 3, 4])], [], [], [], [("a", [5, 6, 7, 8])], []]


def test_requests_that_begin_together_do_not_leave_together() -> None:
    holding = a_holding(4)
    steps = [holding.pass_on([an_output(name, [token]) for name in "abcd"]) for token in range(9)]
    assert [[due.request_id for due in step] for step in steps[1:]] == [["d"], ["c"], ["b"], ["a"]] * 2


def test_an_end_leaves_with_what_was_held() -> None:
    holding = a_holding(16)
    for token in range(3):
        holding.pass_on([an_output("a", [token])])
    (last,) = holding.pass_on([an_output("a", [3], finish_reason=finish(), stop_reason=3)])
    assert content(last) == ("a", [1, 2, 3])
    assert (last.finish_reason, last.stop_reason) == (finish(), 3)
    (next_first,) = holding.pass_on([an_output("a", [9])])
    assert content(next_first) == ("a", [9]), "nothing is left of it"


def test_an_end_without_tokens_leaves_with_what_was_held() -> None:
    from vllm.v1.engine import EngineCoreOutput

    holding = a_holding(16)
    for token in range(3):
        holding.pass_on([an_output("a", [token])])
    (last,) = holding.pass_on([EngineCoreOutput("a", [], finish_reason=finish())])
    assert content(last) == ("a", [1, 2])


def test_an_output_with_more_than_tokens_leaves_at_once_with_what_was_held() -> None:
    holding = a_holding(16)
    for token in range(3):
        holding.pass_on([an_output("a", [token])])
    (sent,) = holding.pass_on([an_output("a", [3], events=["preempted"])])
    assert content(sent) == ("a", [1, 2, 3])
    assert sent.events == ["preempted"]
    assert holding.pass_on([an_output("a", [4])]) == []


def test_nothing_is_held_of_a_request_that_was_aborted() -> None:
    holding = a_holding(5)
    for token in range(3):
        holding.pass_on([an_output("a", [token]), an_output("b", [token])])
    holding.drop(["a", "never seen"])
    assert [content(due) for due in holding.pass_on([an_output("a", [7]), an_output("b", [3])])] == [("a", [7])]
    assert [content(due) for due in holding.pass_on([an_output("b", [4])])] == [("b", [1, 2, 3, 4])]


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_or_out_of_order(seed: int) -> None:
    dice = random.Random(seed)
    holding = a_holding(dice.randint(1, 8))
    left: dict[str, list[int]] = {}
    expected: dict[str, list[int]] = {}
    running = {f"r{number}": dice.randint(1, 40) for number in range(12)}
    while running:
        step = []
        for request in list(running):
            tokens = [dice.randrange(1000) for _ in range(min(dice.randint(1, 4), running[request]))]
            expected.setdefault(request, []).extend(tokens)
            running[request] -= len(tokens)
            step.append(an_output(request, tokens, finish_reason=None if running[request] else finish()))
            if not running[request]:
                del running[request]
        for due in holding.pass_on(step):
            request, tokens = content(due)
            left.setdefault(request, []).extend(tokens)
    assert left == expected
