# SPDX-License-Identifier: Apache-2.0
"""`seer verify` on a run of real vLLM with drafts and chunks: log-probabilities, and the tokens of greedy runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from recorded_runs import VOCABULARY, RecordedRun, make_run
from seer.cli.main import main
from seer.engine.vllm import fitting
from vllm_engines import HEAD_DIM, needs_vllm

pytestmark = needs_vllm

RUNS = ("0", "1")
"""Temperatures."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecordedRun]:
    home = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "SMALL_MODEL_BYTES", 0)  # drafts, also for a small model
        return {
            name: make_run(home / name, "--engine", "vllm", "--device", "cpu", "--temperature", name, head_dim=HEAD_DIM)
            for name in RUNS
        }


def verified(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["verify", str(run.path), "--share", "1", "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_vllm_is_clean(runs: dict[str, RecordedRun], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verified(runs[name], capsys)
    assert (code, found["is_clean"], found["num_mismatches"], found["findings"]) == (0, True, 0, [])
    assert found["num_responses"] == len(runs[name].responses())
    # On a CPU vLLM's noise is not a function of the position: only greedy tokens can be repeated.
    assert found["num_compared"] == (found["num_tokens"] if name == "0" else 0)


@pytest.mark.parametrize("name", RUNS)
def test_another_token_in_its_place_is_found(
    runs: dict[str, RecordedRun], name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    copy = runs[name].copied_to(tmp_path)
    at, one = next((i, one) for i, one in enumerate(copy.responses()) if one["finish_reason"] == "length")
    tokens = one["token_ids"]
    tokens[5] = next(token for token in range(3, VOCABULARY) if token != tokens[5])
    copy.change_response(at, token_ids=tokens, text=" ".join(f"w{token}" for token in tokens))
    code, found = verified(copy, capsys)
    assert (code, found["is_clean"]) == (1, False)
    assert found["max_logprob_gap"] > found["gap_limit"] or found["num_mismatches"]
