# SPDX-License-Identifier: Apache-2.0
"""GRPO in TRL with vLLM as Seer's engine. Starting vLLM takes a minute, so this runs in the long form only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")
if not os.environ.get("SEER_GRPO_VLLM"):
    pytest.skip("set SEER_GRPO_VLLM=1, or make test-grpo", allow_module_level=True)

from expert_models import deepseek, qwen3_moe
from seer.integrations.trl import seer_rollouts
from trl_toy import WORDS, rewards_of, torch, toy_model, toy_trainer

TOY: dict[str, Any] = {"vocab_size": len(WORDS), "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.1}
SMALL: dict[str, Any] = {"kv_memory_bytes": 256 << 20, "max_num_seqs": 8, "max_model_len": 128}


def test_a_model_with_a_tied_head_learns_on_policy(tmp_path: Path) -> None:
    """The head's weights are the embedding's: an engine that keeps a copy of them has to renew it."""
    with seer_rollouts(engine="vllm", dtype="float32", speculation="off", **SMALL) as rollouts:
        trainer = toy_trainer(rollouts, tmp_path, model=toy_model(0, head_dim=64), max_steps=12)
        trainer.train()
    rewards = rewards_of(trainer)
    assert rewards[-1] > rewards[0] + 0.3
    assert all(line["seer/on_policy/mean_gap"] < 1e-5 for line in trainer.state.log_history if "reward" in line)


def test_an_adapter_is_rolled_out_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=linear, task_type="CAUSAL_LM")
    with seer_rollouts(engine="vllm", dtype="float32", speculation="off", **SMALL) as rollouts:
        model = toy_model(0, head_dim=64)
        trainer = toy_trainer(rollouts, tmp_path, model=model, peft_config=config, max_steps=6, learning_rate=1e-2)
        trainer.train()
    gaps = [line["seer/on_policy/mean_gap"] for line in trainer.state.log_history if "reward" in line]
    assert len(gaps) == 6
    assert max(gaps) < 1e-5, gaps


def test_experts_of_deepseeks_shape_learn_on_policy(tmp_path: Path) -> None:
    """The trainer holds all experts of a layer in one tensor, and vLLM loads each from a tensor of its own.

    The bias that corrects the choice of experts is a buffer: without it other experts answer.
    """
    model = deepseek(**TOY)
    model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias").copy_(torch.linspace(-0.5, 0.5, 8))
    assert_on_policy(tmp_path, model)


def test_an_adapter_of_fused_experts_is_rolled_out_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=8, target_modules=["q_proj"], target_parameters=experts, task_type="CAUSAL_LM")
    assert_on_policy(tmp_path, qwen3_moe(**TOY), peft_config=config)


def assert_on_policy(folder: Path, model: Any, **settings: Any) -> None:
    """Over some steps, in which new weights are sent as well as those that the engine starts with."""
    with seer_rollouts(engine="vllm", dtype="float32", speculation="off", **SMALL) as rollouts:
        trainer = toy_trainer(rollouts, folder, model=model, max_steps=4, **settings)
        trainer.train()
    lines = [line for line in trainer.state.log_history if "reward" in line]
    assert [line["seer/weights_version"] for line in lines] == [0, 1, 2, 3]
    gaps = [line["seer/on_policy/mean_gap"] for line in lines]
    assert max(gaps) < 1e-5, gaps
