# SPDX-License-Identifier: Apache-2.0
"""GRPO with adapters of PEFT: the rollout has the merged weights in every step, and the trainer's stay as they are."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from transformers import TrainerCallback

from seer.errors import ConfigError
from seer.integrations.trl import seer_rollouts
from seer.integrations.trl.groups import group_seed
from seer.integrations.trl.rollout_settings import RolloutSettings, read_settings
from seer.runs.prompts import Prompt
from seer.sync_api import SyncRollout
from trl_toy import (
    WEIGHTS_KEPT,
    Heard,
    rewards_of,
    same_weights,
    toy_model,
    toy_tokenizer,
    toy_trainer,
    weights_of,
)

SMALL: dict[str, Any] = {"kv_blocks": 256, "block_size": 4, "max_num_seqs": 16}
EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(**settings: Any) -> LoraConfig:
    defaults: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": EVERYWHERE, "task_type": "CAUSAL_LM"}
    return LoraConfig(**defaults | settings)


def lora_trainer(rollouts: Any, output_dir: Path, config: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)  # adapters begin with random values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what peft says of tied heads
        return toy_trainer(rollouts, output_dir, peft_config=config or lora(), **{"learning_rate": 1e-2} | settings)


def gaps_of(trainer: Any) -> list[float]:
    return [line["seer/on_policy/mean_gap"] for line in trainer.state.log_history if "reward" in line]


def base_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights_of(trainer).items() if "lora_" not in name}


def test_lora_learns_on_policy_and_leaves_the_base_as_it_was(tmp_path: Path) -> None:
    with seer_rollouts(**SMALL) as rollouts:
        trainer = lora_trainer(rollouts, tmp_path, max_steps=20)
        base = base_of(trainer)
        trainer.train()
    rewards = rewards_of(trainer)
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.3
    gaps = gaps_of(trainer)
    assert len(gaps) == 20
    assert max(gaps) < 1e-5, gaps
    versions = [line["seer/weights_version"] for line in trainer.state.log_history if "reward" in line]
    assert versions == list(range(20))
    assert same_weights(base_of(trainer), base)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"use_rslora": True},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head", "norm"]},
        {"lora_dropout": 0.2},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_other_kinds_of_lora_stay_on_policy(tmp_path: Path, settings: dict[str, Any]) -> None:
    with seer_rollouts(**SMALL) as rollouts:
        trainer = lora_trainer(rollouts, tmp_path, lora(**settings), max_steps=3)
        before = weights_of(trainer)
        trainer.train()
    assert max(gaps_of(trainer)) < 1e-5, gaps_of(trainer)
    assert not same_weights(weights_of(trainer), before)


def test_another_kind_of_adapter_stays_on_policy(tmp_path: Path) -> None:
    config = IA3Config(target_modules=EVERYWHERE, feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    with seer_rollouts(**SMALL) as rollouts:
        trainer = lora_trainer(rollouts, tmp_path, config, max_steps=3)
        trainer.train()
    assert max(gaps_of(trainer)) < 1e-5, gaps_of(trainer)


def test_a_rollout_changes_no_bit_and_has_the_tokens_of_the_merged_model(tmp_path: Path) -> None:
    """The instances of the second step got the adapter while they ran; a merged model is loaded from a folder."""
    seen: list[tuple[Path, RolloutSettings, Any]] = []

    def watched(prompts: list[Any], trainer: Any) -> Any:
        before = weights_of(trainer)
        columns = rollouts(prompts, trainer)
        assert same_weights(weights_of(trainer), before)
        folder = tmp_path / f"merged-{len(seen)}"
        copy.deepcopy(trainer.model).merge_and_unload().save_pretrained(folder)
        toy_tokenizer().save_pretrained(folder)
        seen.append((folder, read_settings(trainer), columns))
        return columns

    with seer_rollouts(**SMALL) as rollouts:
        lora_trainer(watched, tmp_path / "out", max_steps=2).train()
    assert len(seen) == 2
    for folder, asked, columns in seen:
        prompts = [
            Prompt(id=str(place), token_ids=tuple(ids), n=8, seed=group_seed(asked, 0, place))
            for place, ids in enumerate(columns["prompt_ids"][::8])
        ]
        with SyncRollout(folder, **SMALL) as rollout:
            groups = sorted(rollout.run(prompts, sampling=asked.sampling, seed=asked.seed), key=lambda one: one.group)
        found = [response for group in groups for response in group.responses]
        assert [response.token_ids for response in found] == columns["completion_ids"], folder.name
        assert [response.logprobs for response in found] == columns["logprobs"], folder.name


def test_the_reference_is_the_model_without_its_adapter(tmp_path: Path) -> None:
    with seer_rollouts(**SMALL) as rollouts:
        trainer = lora_trainer(rollouts, tmp_path, max_steps=3, beta=0.05)
        trainer.train()
    divergences = [line["kl"] for line in trainer.state.log_history if "kl" in line]
    assert divergences[0] == pytest.approx(0.0, abs=1e-6), "before the first update both are the same"
    assert divergences[-1] > 1e-4
    assert max(gaps_of(trainer)) < 1e-5


def test_an_adapter_that_was_trained_before_has_itself_as_reference(tmp_path: Path) -> None:
    """TRL gives such a model a second adapter, a frozen copy, which is not the one to roll out."""
    torch.manual_seed(0)
    model = get_peft_model(toy_model(0), lora(init_lora_weights=False))
    with seer_rollouts(**SMALL) as rollouts:
        trainer = toy_trainer(rollouts, tmp_path, model=model, max_steps=3, beta=0.05, learning_rate=1e-2)
        assert set(model.peft_config) == {"default", "ref"}
        trainer.train()
    assert max(gaps_of(trainer)) < 1e-5
    assert [line["kl"] for line in trainer.state.log_history if "kl" in line][-1] > 1e-4


def test_an_interrupted_run_resumes_to_the_same_adapter(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            control.should_training_stop = state.global_step == 3

    trained, tokens = [], []
    for name, callbacks in (("straight", []), ("resumed", [Stop()])):
        settings: dict[str, Any] = {"max_steps": 6, "num_rows": 40, "callbacks": callbacks, **WEIGHTS_KEPT}
        with seer_rollouts(**SMALL) as rollouts:
            heard = Heard(rollouts)
            trainer = lora_trainer(heard, tmp_path / name, **settings)
            trainer.train()
            if callbacks:
                assert trainer.state.global_step == 3
                settings["callbacks"] = []
                trainer = lora_trainer(heard, tmp_path / name, **settings)
                trainer.train(resume_from_checkpoint=True)
        assert max(gaps_of(trainer)) < 1e-5
        tokens.append(heard.completions)
        trained.append(weights_of(trainer))
    assert tokens[0] == tokens[1]
    assert same_weights(*trained)


def test_an_adapter_that_cannot_be_merged_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with seer_rollouts(**SMALL) as rollouts:
        trainer = lora_trainer(rollouts, tmp_path, config, max_steps=1)
        with pytest.raises(ConfigError, match="peft_config: PROMPT_TUNING"):
            trainer.train()
        assert rollouts.record is None
        assert not rollouts.instances.are_up
