# SPDX-License-Identifier: Apache-2.0
"""Sampling that vLLM cannot do is refused before anything starts, and ends the chunk that slips through."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from seer import Rollout, Sampling
from seer.config import VllmEngineConfig, VllmSpeculation
from seer.engine.local.tiny import make_tiny_model
from seer.engine.vllm.model_folder import ModelFolder, read_folder
from seer.engine.vllm.sampling_limits import refuse_sampling
from seer.errors import InputError
from seer.runs.prompt_lines import Prompt
from vllm_engines import HEAD_DIM, needs_vllm

pytestmark = needs_vllm

VOCABULARY = 128
ENDS = tuple(range(VOCABULARY))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return read_folder(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", head_dim=HEAD_DIM))


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        ({"temperature": 3.0}, r"temperature=3: vLLM samples at 0\.01 to 2"),
        ({"temperature": 0.005}, "temperature=0.005"),
        ({"min_p": 0.1}, "min_p=0.1: vLLM's older runner"),
        ({"stop_token_ids": ENDS, "min_tokens": 1}, "every token of the vocabulary"),
        ({"stop_token_ids": tuple({*ENDS} - {2}), "min_tokens": 1}, "every token of the vocabulary"),
    ],
)
def test_what_vllm_would_not_sample_as_asked_is_refused(
    folder: ModelFolder, sampling: dict[str, Any], why: str
) -> None:
    assert folder.eos_token_ids == (2,)
    with pytest.raises(InputError, match=why) as refused:
        refuse_sampling(Sampling(max_tokens=4, **sampling), folder, on_cpu=True, drafts_in_scheduler=True)
    assert refused.value.hint


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.01},
        {"temperature": 2.0},
        {"min_p": 0.1},
        {"stop_token_ids": ENDS},
        {"stop_token_ids": tuple({*ENDS} - {2}), "min_tokens": 1, "ignore_eos": True},
    ],
)
def test_what_vllm_samples_is_not_refused(folder: ModelFolder, sampling: dict[str, Any]) -> None:
    refuse_sampling(Sampling(max_tokens=4, **sampling), folder, on_cpu=True, drafts_in_scheduler=False)


def test_on_a_gpu_more_stop_tokens_than_vllm_takes_are_refused_where_they_are_to_be_kept_out(tmp_path: Path) -> None:
    large = read_folder(make_tiny_model(tmp_path / "m", vocab_size=400))
    most, more = (Sampling(max_tokens=4, min_tokens=1, stop_token_ids=tuple(range(3, 3 + n))) for n in (127, 128))
    refuse_sampling(most, large, on_cpu=False, drafts_in_scheduler=False)  # and the end token
    refuse_sampling(more, large, on_cpu=True, drafts_in_scheduler=False)
    with pytest.raises(InputError, match="129 tokens that end a response: vLLM takes 128"):
        refuse_sampling(more, large, on_cpu=False, drafts_in_scheduler=False)
    refuse_sampling(replace(more, min_tokens=0), large, on_cpu=False, drafts_in_scheduler=False)


@pytest.mark.parametrize("where", ["of the run", "of a prompt"])
def test_a_rollout_refuses_it_in_one_line_before_anything_starts(folder: ModelFolder, where: str) -> None:
    rollout = Rollout(folder.path, engine="vllm")
    hot = Sampling(max_tokens=4, temperature=3.0)
    prompt = Prompt(id="a", token_ids=(1, 2), sampling={} if where == "of the run" else {"temperature": 3.0})
    with pytest.raises(InputError, match="temperature=3") as refused:
        rollout.encode([prompt], sampling=hot if where == "of the run" else None)
    assert str(refused.value).count("temperature=3") == 1
    assert len(rollout.encode([Prompt(id="a", token_ids=(1, 2))])) == 1


@pytest.mark.parametrize(("speculation", "is_refused"), [("auto", True), ("off", False)])
def test_min_p_is_refused_where_the_scheduler_drafts(folder: ModelFolder, speculation: Any, is_refused: bool) -> None:
    drafts = VllmEngineConfig(speculation=VllmSpeculation())
    rollout = Rollout(folder.path, engine="vllm", engine_settings=drafts, speculation=speculation)
    assert rollout.engine.refuse_sampling is not None
    if is_refused:
        with pytest.raises(InputError, match="min_p"):
            rollout.engine.refuse_sampling(Sampling(max_tokens=4, min_p=0.1))
    else:
        rollout.engine.refuse_sampling(Sampling(max_tokens=4, min_p=0.1))


def test_end_tokens_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    made = make_tiny_model(tmp_path / "tiny", head_dim=HEAD_DIM)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, VOCABULARY, 151_645]}))
    assert read_folder(made).eos_token_ids == (2,)
