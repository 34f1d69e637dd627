# SPDX-License-Identifier: Apache-2.0
"""What a request carries through vLLM is read as types: a client of a server can set it too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from chunk_facts_cases import BAD, GOOD, HINTS, NUM_TOKENS, REQUIRED
from seer.engine.vllm import chunk_facts
from seer.engine.vllm.chunk_facts import ChunkFacts, read_facts


def read(given: Any) -> ChunkFacts | None:
    return read_facts(SimpleNamespace(extra_args={"seer": given}), NUM_TOKENS, name="7.0")


def test_facts_of_a_chunk_are_read_as_they_were_written() -> None:
    facts = read(GOOD)
    assert facts is not None
    assert (facts.request, facts.num_prompt_tokens, facts.lease) == (7, 3, 64)
    assert read(msgspec.to_builtins(facts)) == facts
    assert GOOD.keys() == HINTS.keys(), "every fact has a good value here"


@pytest.mark.parametrize(("name", "value"), BAD)
def test_facts_of_another_form_are_those_of_a_stranger(name: str, value: Any) -> None:
    assert read(GOOD | {name: value}) is None


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_fact_makes_a_stranger(name: str) -> None:
    assert read({key: one for key, one in GOOD.items() if key != name}) is None


@pytest.mark.parametrize(
    "params", [None, SimpleNamespace(), SimpleNamespace(extra_args=None), SimpleNamespace(extra_args=5)]
)
def test_parameters_without_facts_have_none(params: Any) -> None:
    assert read_facts(params, NUM_TOKENS) is None
    others: tuple[Any, ...] = (None, 5, "text", [], {})
    assert [read(extra) for extra in others] == [None] * 5


def test_the_first_refusal_is_said_with_what_it_got_and_the_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_facts, "refusals", chunk_facts._Refusals())
    for _ in range(3):
        assert read(GOOD | {"lease": -5, "model": "m"}) is None
    (said,) = caplog.messages
    assert "'7.0'" in said
    assert ">= 1 - at `$.lease`, got -5" in said
