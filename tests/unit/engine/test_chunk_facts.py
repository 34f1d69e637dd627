# SPDX-License-Identifier: Apache-2.0
"""What a request carries through vLLM is read as types: a client of a server can set it too."""

from __future__ import annotations

import typing
from types import SimpleNamespace
from typing import Any

import pytest

from bad_values import bad_values
from seer.engine.vllm.chunk_facts import ChunkFacts, extra_of, read_facts

GOOD: dict[str, Any] = {
    "request": 7,
    "attempt": 0,
    "model": "m",
    "weights_version": 0,
    "num_prompt_tokens": 16,
    "max_left": 100,
    "load": True,
    "has_turns": False,
    "num_fresh": 0,
}
BAD = [
    (name, value)
    for name, kind in typing.get_type_hints(ChunkFacts, include_extras=True).items()
    for value in bad_values(kind)
]


def test_facts_of_a_chunk_are_read() -> None:
    facts = read_facts(extra_of(SimpleNamespace(extra_args={"seer": GOOD}), "seer"))
    assert facts is not None
    assert (facts.request, facts.num_prompt_tokens) == (7, 16)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_facts_of_another_form_are_those_of_a_stranger(name: str, value: Any) -> None:
    assert read_facts(GOOD | {name: value}) is None
    assert read_facts({key: one for key, one in GOOD.items() if key != name}) is None


@pytest.mark.parametrize(
    "params", [None, SimpleNamespace(), SimpleNamespace(extra_args=None), SimpleNamespace(extra_args=5)]
)
def test_parameters_without_facts_have_none(params: Any) -> None:
    assert extra_of(params, "seer") is None
    others: tuple[Any, ...] = (None, 5, "text", [], {})
    assert [read_facts(extra) for extra in others] == [None] * 5
