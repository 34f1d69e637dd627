# SPDX-License-Identifier: Apache-2.0
"""A toy that GRPO can learn in seconds on a CPU: say even digits when asked for even ones, odd ones when for odd.

The reward is the share of the response's tokens that are what was asked for. Random play gets 5 in 16; saying
nothing but digits gets a half; more than that needs the prompt to have been understood.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` is what these tests are about
os.environ.setdefault("HF_HUB_OFFLINE", "1")

with warnings.catch_warnings():
    # What importing them says of each other's versions is not ours to mend.
    warnings.simplefilter("ignore")
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

DIGITS = [str(digit) for digit in range(10)]
WORDS = ["<pad>", "<eos>", "<unk>", "even", "odd", "now", *DIGITS]
RANDOM_REWARD = 5 / len(WORDS)
WEIGHTS_KEPT: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}


def toy_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def toy_model(seed: int, *, head_dim: int = 16) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=4 * head_dim,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.1,  # wide enough that the prompt makes a difference from the start
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def toy_dataset(num_rows: int = 8) -> Dataset:
    # Every prompt once, and some longer than others.
    kinds = ("even", "odd")
    rows = [{"prompt": " ".join([kinds[i % 2]] + ["now"] * (i // 2)), "kind": kinds[i % 2]} for i in range(num_rows)]
    return Dataset.from_list(rows)


def share_of_kind(completions: list[str], kind: list[str], **rest: Any) -> list[float]:
    return [share(text, wanted) for text, wanted in zip(completions, kind, strict=True)]


def share(text: str, kind: str) -> float:
    words = text.split()
    return sum(word in DIGITS[kind == "odd" :: 2] for word in words) / max(1, len(words))


def toy_trainer(rollout_func: Any, output_dir: Path, *, seed: int = 0, **settings: Any) -> GRPOTrainer:
    rewards = settings.pop("reward_funcs", share_of_kind)
    callbacks = settings.pop("callbacks", [])
    num_rows = settings.pop("num_rows", 8)
    model = settings.pop("model", None) or toy_model(seed)
    peft_config = settings.pop("peft_config", None)
    eval_dataset = settings.pop("eval_dataset", None)
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": 12,
        "learning_rate": 4e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 4,
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "beta": 0.0,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }
    return GRPOTrainer(
        model=model,
        processing_class=toy_tokenizer(),
        reward_funcs=rewards,
        args=GRPOConfig(output_dir=str(output_dir), seed=seed, **defaults | settings),
        train_dataset=toy_dataset(num_rows),
        eval_dataset=eval_dataset,
        rollout_func=rollout_func,
        callbacks=callbacks,
        peft_config=peft_config,
    )


class Heard:
    """A `rollout_func` that remembers what went through it."""

    def __init__(self, rollouts: Any) -> None:
        self._rollouts = rollouts
        self.completions: list[list[list[int]]] = []
        """By rollout, then by prompt."""

    def __call__(self, prompts: list[Any], trainer: Any) -> Any:
        columns = self._rollouts(prompts, trainer)
        self.completions.append(columns["completion_ids"])
        return columns


def rewards_of(trainer: GRPOTrainer) -> list[float]:
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


def weights_of(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    model: torch.nn.Module = trainer.model  # type: ignore[assignment]
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
