# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities that are no numbers are never clean, whoever made them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from builders import a_response
from seer.engine.local.tiny import make_tiny_model
from seer.types import Sampling
from seer.verification.noise import Scoring
from seer.verification.verify import PlainModel, ResponseToVerify, Verification, verify

PROMPT, TOKENS = (5, 6, 7), (11, 12, 13)


@pytest.fixture
def model(tmp_path: Path) -> PlainModel:
    return PlainModel(make_tiny_model(tmp_path))


def verified(model: PlainModel, logprobs: list[float], raw_logprobs: list[float]) -> Verification:
    """As of an engine whose tokens are not promised: only the log-probabilities say whether they are right."""
    response = a_response(TOKENS, logprobs=logprobs, raw_logprobs=raw_logprobs)
    asked = ResponseToVerify(PROMPT, Sampling(max_tokens=9), response)
    return verify(model, [asked], Scoring(dtype="bfloat16"))


def right_logprobs(model: PlainModel) -> list[float]:
    rows = model.logits([*PROMPT, *TOKENS][:-1], len(PROMPT) - 1).log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, TOKENS, strict=True)]


def test_an_engine_that_reports_no_number_is_not_clean(model: PlainModel) -> None:
    right = right_logprobs(model)
    broken = [right[0], math.nan, right[2]]
    assert verified(model, right, right).is_clean
    assert not verified(model, broken, right).is_clean
    assert not verified(model, right, broken).is_clean


def test_weights_that_give_no_number_are_not_clean(model: PlainModel) -> None:
    right = right_logprobs(model)
    model._weights["model.norm.weight"][:] = math.nan
    assert not verified(model, right, right).is_clean
