# SPDX-License-Identifier: Apache-2.0
"""What a rollout in TRL would start with, without a trainer: the model folder that Seer writes for a model."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from peft import get_peft_model
from safetensors.torch import load_file

from seer.engine.staged_weights import remove_shared_folder
from seer.integrations.trl.trainer_weights import WEIGHTS_FILE, write_model_folder
from trl_toy import toy_tokenizer


def a_trainer(model: Any, step: int = 0, *, is_fsdp2: bool = False) -> Any:
    """As much of a GRPOTrainer as weights are read from."""
    return SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(
            unwrap_model=lambda model: model, is_fsdp2=is_fsdp2, num_processes=1, device=torch.device("cpu")
        ),
        is_fsdp_enabled=is_fsdp2,
        is_deepspeed_enabled=False,
        state=SimpleNamespace(global_step=step),
        processing_class=toy_tokenizer(),
    )


def with_trained_adapters(model: Any, config: Any) -> Any:
    """The model with adapters that have been trained a little: every one of their parameters is random."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied heads, and norms that peft thinks it does not know
        model = get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def written(model: Any, **settings: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the configuration of the model folder that a rollout would start with."""
    folder = write_model_folder(a_trainer(model, **settings))
    try:
        return load_file(folder / WEIGHTS_FILE), json.loads((folder / "config.json").read_text())
    finally:
        remove_shared_folder(folder)
