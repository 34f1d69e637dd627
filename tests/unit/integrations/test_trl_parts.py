# SPDX-License-Identifier: Apache-2.0
"""The parts of the TRL adapter that need neither TRL nor torch: groups, seeds, settings, memory, the gap."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builders import a_response
from seer.errors import ConfigError
from seer.integrations.trl.groups import find_groups, group_seed, prompt_key
from seer.integrations.trl.instances import VLLM_GPU_SHARE, TrainedInstances
from seer.integrations.trl.on_policy import _comparable, _compare
from seer.integrations.trl.prompt_memory import MAX_PAST_RESPONSES, PromptMemory
from seer.integrations.trl.rollout_settings import RolloutSettings, read_settings
from seer.types import GroupResult, Sampling


def a_trainer(*, training: bool = True, **changes: Any) -> Any:
    """As much of a GRPOTrainer as the settings are read from."""
    args = SimpleNamespace(seed=7, generation_kwargs=None, use_vllm=False, repetition_penalty=1.0)
    trainer = SimpleNamespace(
        args=args,
        model=SimpleNamespace(training=training),
        state=SimpleNamespace(global_step=3),
        num_generations=8,
        num_generations_eval=2,
        max_completion_length=64,
        temperature=0.9,
        top_p=0.95,
        top_k=0,
        min_p=None,
        eos_token_ids=[5, 6],
        tools=[],
    )
    for name, value in changes.items():
        setattr(args if hasattr(args, name) else trainer, name, value)
    return trainer


def a_group(*lengths: int) -> GroupResult:
    responses = tuple(a_response(range(length), prompt_id="p", index=index) for index, length in enumerate(lengths))
    return GroupResult(group=0, prompt_id="p", prompt_token_ids=(1,), responses=responses)


def test_runs_of_equal_prompts_are_groups() -> None:
    groups = find_groups(["a", "a", "a", "b", "b", "b"], 3)
    assert [(group.prompt, group.size) for group in groups] == [("a", 3), ("b", 3)]


def test_a_prompt_that_comes_twice_in_a_row_makes_two_groups_of_one_key() -> None:
    first, second = find_groups([[{"role": "user", "content": "a"}]] * 4, 2)
    assert first.size == second.size == 2
    assert first.key == second.key


def test_a_cut_batch_leaves_a_smaller_group() -> None:
    assert [group.size for group in find_groups(["a", "a", "a", "a", "b"], 4)] == [4, 1]


def test_the_key_does_not_depend_on_the_order_of_a_messages_fields() -> None:
    assert prompt_key([{"role": "user", "content": "a"}]) == prompt_key([{"content": "a", "role": "user"}])
    assert prompt_key("a") != prompt_key("b")


def test_seeds_differ_by_everything_a_resumed_run_knows() -> None:
    def settings(seed: int = 0, step: int = 0, mode: Any = "train") -> RolloutSettings:
        return RolloutSettings(mode, Sampling(max_tokens=1), 2, seed, step)

    places = [(settings(), 0, 0), (settings(), 0, 1), (settings(), 1, 0), (settings(step=1), 0, 0)]
    places += [(settings(seed=1), 0, 0), (settings(mode="eval"), 0, 0)]
    assert len({group_seed(*place) for place in places}) == len(places)
    assert group_seed(settings(), 0, 0) == group_seed(settings(), 0, 0)
    assert all(0 <= group_seed(*place) < 2**63 for place in places)


def test_sampling_is_the_trainers() -> None:
    found = read_settings(a_trainer(top_k=20, min_p=0.05, generation_kwargs={"min_new_tokens": 2, "top_p": 0.5}))
    assert found.sampling == Sampling(
        max_tokens=64,
        temperature=0.9,
        top_p=0.5,
        top_k=20,
        min_p=0.05,
        min_tokens=2,
        stop_token_ids=(5, 6),
        ignore_eos=True,
    )
    assert (found.mode, found.group_size, found.seed, found.step) == ("train", 8, 7, 3)


def test_an_evaluation_has_its_own_group_size_and_nothing_is_cut_by_default() -> None:
    found = read_settings(a_trainer(training=False, top_p=1.0))
    assert (found.mode, found.group_size) == ("eval", 2)
    assert (found.sampling.top_k, found.sampling.min_p) == (None, 0.0)


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("use_vllm", True, "use_vllm=True"),
        ("repetition_penalty", 1.1, "repetition_penalty=1.1"),
        ("generation_kwargs", {"num_beams": 2}, r"generation_kwargs\['num_beams'\]"),
        ("tools", [print], "tools"),
        ("temperature", 0.0, "temperature=0"),
        ("top_p", 1.5, "top_p=1.5"),
        ("max_completion_length", 0, "max_tokens=0"),
    ],
)
def test_what_seer_cannot_do_is_refused_by_name(setting: str, value: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_settings(a_trainer(**{setting: value}))


def test_only_a_prompts_newest_rollout_is_remembered() -> None:
    memory = PromptMemory(lengths=True, responses=True)
    memory.learn("a", a_group(3, 9))
    memory.learn("a", a_group(2, 4, 1, 3, 5, 6, 7, 8))
    assert memory.lengths(["a", "b"]) == {"a": 8}
    kept = memory.responses(["a", "b"])["a"]
    assert len(kept) == MAX_PAST_RESPONSES
    assert max(map(len, kept)) == 8, "the longest is kept"


def test_a_memory_that_is_switched_off_knows_nothing() -> None:
    for lengths, responses in ((False, False), (True, False), (False, True)):
        memory = PromptMemory(lengths=lengths, responses=responses)
        memory.learn("a", a_group(3))
        assert bool(memory.lengths(["a"])) == lengths
        assert bool(memory.responses(["a"])) == responses


def test_the_prompts_not_seen_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seer.integrations.trl.prompt_memory.MAX_PROMPTS", 2)
    memory = PromptMemory()
    for key in ("a", "b", "a", "c"):
        memory.learn(key, a_group(3))
    assert sorted(memory.lengths("abc")) == ["a", "c"]


def test_equal_log_probabilities_are_on_policy_and_others_are_not() -> None:
    same = _compare([-1.0, -2.0], [-1.0, -2.0], limit=1e-3)
    assert (same.mean_ratio, same.largest_gap, same.is_on_policy) == (1.0, 0.0, True)
    off = _compare([-1.0, -2.0], [-1.0, -2.5], limit=1e-3)
    assert (off.largest_gap, off.mean_gap, off.is_on_policy) == (0.5, 0.25, False)
    assert not _compare([float("nan")], [-1.0], limit=1e-3).is_on_policy


@pytest.mark.parametrize(
    ("sampling", "compared"),
    [
        (Sampling(max_tokens=1, temperature=0.7), [-1.0]),
        (Sampling(max_tokens=1, top_p=0.9), [-2.0]),
        (Sampling(max_tokens=1, top_p=0.9, temperature=0.7), None),
    ],
)
def test_only_what_the_trainer_computes_too_is_compared(sampling: Sampling, compared: list[float] | None) -> None:
    assert _comparable(a_response([1], logprobs=[-1.0], raw_logprobs=[-2.0]), sampling) == compared


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"engine": "vllm"}, {"engine": {"gpu_memory_utilization": VLLM_GPU_SHARE}}),
        ({"engine": "vllm", "instances": 2}, {"engine": {"gpu_memory_utilization": VLLM_GPU_SHARE / 2}}),
        ({"engine": "vllm", "kv_memory_bytes": 1 << 30}, None),
        ({"engine": "vllm", "engine_settings": {"stream_tokens": 8}}, {"stream_tokens": 8}),
        ({"engine": "vllm", "device": "cuda:1"}, None),
        ({"engine": "local"}, None),
    ],
)
def test_vllm_leaves_the_trainer_its_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    started: list[dict[str, Any]] = []

    class Fleet:
        def __init__(self, model: Path, **options: Any) -> None:
            started.append(options)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr("seer.integrations.trl.instances.SyncRollout", Fleet)
    monkeypatch.setattr("seer.integrations.trl.instances.write_model_folder", lambda _: tmp_path / "model")
    monkeypatch.setattr("seer.integrations.trl.instances.stamp_of", lambda _: (0, ""))
    monkeypatch.setattr("seer.integrations.trl.instances.remove_shared_folder", lambda _: None)
    own = settings.copy()
    instances = TrainedInstances(own.pop("device", None), own)
    instances.sync_with(SimpleNamespace(accelerator=SimpleNamespace(device=SimpleNamespace(type="cuda", index=0))))
    instances.close()
    assert started[0].get("engine_settings") == expected
