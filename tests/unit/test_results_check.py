# SPDX-License-Identifier: Apache-2.0
"""Each thing that can be wrong with a response is found under its kind, and nothing else is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

import builders
from seer.buffer import request_seed
from seer.types import FinishReason, Group, Response, Sampling
from seer.verification.results_check import KINDS, Asked, check_results

EOS, STOP, VOCAB = 2, 7, 50


class Words:
    """A codec: token 5 is "5 "."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{token} " for token in ids)


def asked(codec: Any = None, forced: dict[tuple[int, int], int] | None = None, **sampling: Any) -> Asked:
    settings = Sampling(max_tokens=4, stop_token_ids=(STOP,), **sampling)
    groups = [
        Group(id=i, num_requests=2, num_prompt_tokens=3, sampling=settings, prompt=(1, 1, i + 8), seed=i, key=f"p{i}")
        for i in range(2)
    ]
    return Asked(groups=groups, codec=codec, vocab_size=VOCAB, eos_token_ids=frozenset({EOS}), forced_lengths=forced)


def a_response(group: int, index: int, tokens: tuple[int, ...] = (9, 9, EOS), **changes: Any) -> Response:
    fields: dict[str, Any] = {
        "group": group,
        "prompt_id": f"p{group}",
        "index": index,
        "logprobs": [-1.0] * len(tokens),
        "weights_version": 3,
        "seed": request_seed(group, index),
        "num_prompt_tokens": 3,
    }
    return builders.a_response(tokens, **fields | changes)


def all_with(last: Response) -> list[Response]:
    return [a_response(0, 0), a_response(0, 1), a_response(1, 0), last]


def kinds(asked: Asked, responses: list[Response]) -> dict[str, int]:
    return {one.kind: one.count for one in check_results(asked, responses).ordered()}


GOOD = [
    {},
    {"tokens": (9, STOP)},
    {"tokens": (EOS,)},
    {"tokens": (9, 9, 9, 9), "finish_reason": FinishReason.LENGTH},
    {"tokens": (9, 9, 9, EOS)},
    {"tokens": (0, VOCAB - 1, EOS)},
    {"raw_logprobs": [-1.0] * 3},
]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("seed", {"seed": request_seed(1, 0)}),
    ("weights_version", {"weights_version": 4}),
    ("counts", {"num_tokens": 2}),
    ("counts", {"logprobs": [-1.0] * 2}),
    ("counts", {"raw_logprobs": [-1.0] * 4}),
    ("counts", {"num_prompt_tokens": 2}),
    ("vocabulary", {"tokens": (9, VOCAB, EOS)}),
    ("vocabulary", {"tokens": (9, -1, EOS)}),
    ("unfinished", {"finish_reason": FinishReason.FAILED, "error": "why"}),
    ("unfinished", {"finish_reason": FinishReason.CANCELLED}),
    ("end", {"finish_reason": FinishReason.LENGTH}),
    ("end", {"error": "and yet it stopped"}),
    ("end", {"tokens": (9, EOS, 9)}),
    ("end", {"tokens": (9, STOP, EOS)}),
    ("end", {"tokens": (9, 9)}),
    ("end", {"tokens": (9, 9, 9, 9)}),
    ("end", {"tokens": (9, 9, 9, 9, 9), "finish_reason": FinishReason.LENGTH}),
    ("end", {"tokens": ()}),
    ("text", {"text": "not asked for"}),
]


@pytest.mark.parametrize("changes", GOOD)
def test_a_sound_response_has_no_finding(changes: dict[str, Any]) -> None:
    check = check_results(asked(), all_with(a_response(1, 1, **changes)))
    assert check.ordered() == []
    assert len(check.sound) == check.num_responses == 4


@pytest.mark.parametrize(("kind", "changes"), BAD)
def test_a_wrong_response_is_found_by_its_kind_alone(kind: str, changes: dict[str, Any]) -> None:
    check = check_results(asked(), all_with(a_response(1, 1, **changes)))
    assert [(one.kind, one.count) for one in check.ordered()] == [(kind, 1)]
    assert "response 1 of prompt 'p1'" in check.ordered()[0].first
    assert len(check.sound) == 3


def test_log_probabilities_are_there_if_and_only_if_they_were_asked_for() -> None:
    def responses(**changes: Any) -> list[Response]:
        return [a_response(group, index, **changes) for group in range(2) for index in range(2)]

    assert kinds(asked(logprobs=False), responses(logprobs=[])) == {}
    assert kinds(asked(logprobs=False), responses()) == {"counts": 4}
    assert kinds(asked(logprobs=False), responses(logprobs=[], raw_logprobs=[-1.0] * 3)) == {"counts": 4}
    assert kinds(asked(), responses(logprobs=[])) == {"counts": 4}


def test_missing_doubled_and_unknown_responses_are_told_apart() -> None:
    assert kinds(asked(), all_with(a_response(1, 1))[:3]) == {"missing": 1}
    assert kinds(asked(), [*all_with(a_response(1, 1)), a_response(0, 0)]) == {"doubled": 1}
    last_from_the_end = msgspec.structs.replace(a_response(1, 1), group=-1)
    for stranger in (a_response(2, 0), last_from_the_end, a_response(1, 2), a_response(1, -1)):
        assert kinds(asked(), all_with(stranger)) == {"missing": 1, "unknown": 1}
    renamed = a_response(1, 1, prompt_id="p0")
    assert kinds(asked(), all_with(renamed)) == {"unknown": 1}
    assert kinds(asked(), []) == {"missing": 4}


def test_the_text_is_held_against_the_tokens() -> None:
    right = [a_response(g, i, text="9 9 2 ") for g in range(2) for i in range(2)]
    assert kinds(asked(Words()), right) == {}
    assert kinds(asked(Words()), [*right[:3], a_response(1, 1, text="9 9 ")]) == {"text": 1}
    assert kinds(asked(Words()), [*right[:3], a_response(1, 1)]) == {"text": 1}


def test_a_stop_string_ends_a_response_where_it_is_complete() -> None:
    def with_strings(tokens: tuple[int, ...], **sampling: Any) -> dict[str, int]:
        wanted = replace(asked(stop=("9 8",), ignore_eos=True, **sampling), decode=Words().decode)
        ends_later = [a_response(g, i, (6, 9, 8)) for g, i in ((0, 0), (0, 1), (1, 0))]
        return kinds(wanted, [*ends_later, a_response(1, 1, tokens)])

    assert with_strings((9, 8)) == {}
    assert with_strings((6, 9)) == {"end": 1}  # cut short
    assert with_strings((9, 8, 6)) == {"end": 1}  # it went on
    assert with_strings((6, 9, STOP)) == {}
    assert with_strings((9, 8), min_tokens=2) == {"end": 1}  # complete with the second, which ends nothing yet


def test_an_end_token_before_min_tokens_or_with_ignore_eos_is_no_end() -> None:
    early = all_with(a_response(1, 1, (9, EOS)))
    assert kinds(asked(min_tokens=2), early) == {"end": 1}  # the stop token may be the third at the earliest
    assert kinds(asked(min_tokens=1), early) == {}
    assert kinds(asked(ignore_eos=True), all_with(a_response(1, 1, (9, STOP)))) == {"end": 3}


def test_forced_lengths_decide_the_end() -> None:
    forced = {(g, i): 3 for g in range(2) for i in range(2)}
    free = [a_response(g, i, (EOS, 9, 9)) for g in range(2) for i in range(2)]
    assert kinds(asked(forced=forced), free) == {}
    assert kinds(asked(forced=forced | {(1, 1): 2}), free) == {"end": 1}


def test_every_kind_of_a_response_has_a_test() -> None:
    tested = {kind for kind, _ in BAD} | {"missing", "doubled", "unknown"}
    elsewhere = {"settings", "weights", "turns", "mask", "journal"}  # tests/integration/test_verify_{results,turns}.py
    assert tested == KINDS.keys() - elsewhere
