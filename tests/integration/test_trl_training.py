# SPDX-License-Identifier: Apache-2.0
"""GRPO with TRL and Seer on a CPU: it learns, it is on policy, and Seer's mechanisms change no token of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("torch")

import torch

from seer.cli.main import main
from seer.integrations.trl import OffPolicy, SeerRollouts, seer_rollouts
from seer.integrations.trl.instances import TrainedInstances
from seer.metrics.events import Started, Stepped
from seer.metrics.jsonl import read_events
from trl_toy import RANDOM_REWARD, Heard, rewards_of, same_weights, toy_trainer, weights_of

SEEDS = [int(seed) for seed in os.environ.get("SEER_GRPO_SEEDS", "0").split(",")]
SMALL: dict[str, Any] = {"kv_blocks": 256, "block_size": 4, "max_num_seqs": 16}
EVERYTHING_ON: dict[str, Any] = {**SMALL, "instances": 2, "chunk_tokens": 4, "keep_responses": True, "keep_steps": 100}
EVERYTHING_OFF: dict[str, Any] = {
    **SMALL,
    "scheduler": "verl",
    "pool": "none",
    "speculation": "off",
    "chunk_tokens": 512,
    "keep_lengths": False,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Equal bits are promised for one thread.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tiny_model_learns(tmp_path: Path, seed: int) -> None:
    with seer_rollouts(**SMALL) as rollouts:
        trainer = toy_trainer(rollouts, tmp_path, seed=seed, max_steps=20)
        trainer.train()
    rewards = rewards_of(trainer)
    start, end = sum(rewards[:2]) / 2, sum(rewards[-4:]) / 4
    # A response of random tokens has a standard deviation of about 0.14, so the mean of the last 128 of them stays
    # within 0.05 of RANDOM_REWARD; digits of either kind would give a half.
    assert start < RANDOM_REWARD + 0.3
    assert end > 0.85
    assert end > start + 0.3
    for line in trainer.state.log_history:
        if "reward" in line:
            assert line["seer/on_policy/mean_gap"] < 1e-5
            assert line["seer/on_policy/mean_ratio"] == pytest.approx(1.0, abs=1e-4)
            assert line["seer/weights_version"] == line["step"] - 1


def test_weights_that_do_not_arrive_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainedInstances, "_send_weights", lambda self, trainer: None)
    with seer_rollouts(**SMALL) as rollouts:
        trainer = toy_trainer(rollouts, tmp_path, max_steps=2)
        with pytest.warns(OffPolicy, match="step 1 is off policy"):
            trainer.train()
    first, second = (line for line in trainer.state.log_history if "reward" in line)
    assert first["seer/on_policy/mean_gap"] < 1e-5
    assert second["seer/on_policy/mean_gap"] > 1e-3


def test_the_mechanisms_change_no_token_and_so_no_weight(tmp_path: Path) -> None:
    trained = []
    for name, settings in (("on", EVERYTHING_ON), ("off", EVERYTHING_OFF)):
        with seer_rollouts(**settings) as rollouts:
            heard = Heard(rollouts)
            trainer = toy_trainer(heard, tmp_path / name, max_steps=10, max_completion_length=24)
            trainer.train()
            trained.append((heard.completions, weights_of(trainer)))
    (tokens_on, weights_on), (tokens_off, weights_off) = trained
    for step, (on, off) in enumerate(zip(tokens_on, tokens_off, strict=True)):
        assert on == off, f"step {step}"
    assert same_weights(weights_on, weights_off)
    events = [event for path in (tmp_path / "on").glob("seer/step-*/events.jsonl") for event in read_events(path)]
    started = [event for event in events if isinstance(event, Started)]
    assert any(event.moved_from not in (None, event.instance) for event in started), "no request ever moved"
    assert sum(event.num_accepted for event in events if isinstance(event, Stepped)) > 0, "no draft was accepted"


def test_a_second_training_repeats_the_first_and_has_a_loop_of_its_own(tmp_path: Path) -> None:
    with seer_rollouts(**SMALL) as rollouts:
        heard = Heard(rollouts)
        trainers = [toy_trainer(heard, tmp_path / name, max_steps=1) for name in ("a", "b")]
        for trainer in trainers:
            trainer.train()
    first, second = heard.completions
    assert first == second
    assert "seer/loop_s" not in trainers[1].state.log_history[0]


def test_an_evaluation_uses_its_own_group_size_and_sampling(tmp_path: Path) -> None:
    with seer_rollouts(**SMALL) as rollouts:
        heard = Heard(rollouts)
        trainer = toy_trainer(
            heard, tmp_path, max_steps=1, num_generations_eval=2, per_device_eval_batch_size=4, temperature=0.7
        )
        trainer.train()
        assert not rollouts.instances.are_up, "the end of training ends the instances"
        trainer.evaluate(trainer.train_dataset)
        assert rollouts.instances.are_up
    assert not rollouts.instances.are_up
    assert [len(one) for one in heard.completions] == [32, 4, 4, 4, 4]
    assert trainer.state.log_history[-1]["eval_seer/on_policy/mean_gap"] < 1e-5


def test_the_report_shows_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with seer_rollouts(**SMALL, run_dir=tmp_path / "run", keep_steps=2) as rollouts:
        toy_trainer(rollouts, tmp_path / "out", max_steps=3).train()
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-000001", "step-000002"]
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    for shown in ("Training", "reward", "largest gap", "Timeline"):
        assert shown in page
    assert main(["report", str(tmp_path / "run" / "step-000002")]) == 0
    assert main(["replay", str(tmp_path / "run" / "step-000002")]) == 0
    assert "verl-sync" in capsys.readouterr().out


def test_the_instances_can_be_left_to_the_program(tmp_path: Path) -> None:
    rollouts = seer_rollouts(**SMALL)
    toy_trainer(rollouts, tmp_path, max_steps=1).train()
    assert isinstance(rollouts, SeerRollouts)
    assert not rollouts.instances.are_up
    rollouts.close()  # once more does no harm
