# SPDX-License-Identifier: Apache-2.0
"""The trainer's weights for the instances, passed through shared memory.

The instances load a model folder, which the first rollout writes from the trainer's model into shared memory. What the
trainer holds then (for example a checkpoint it resumed from) is weights version 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from seer.engine.staged_weights import make_shared_folder, remove_shared_folder
from seer.errors import ConfigError


def refuse_unreadable(trainer: Any) -> None:
    """Refuse a model whose tensors this process does not hold whole: adapters and sharded weights."""
    if hasattr(trainer.model, "peft_config"):
        raise ConfigError(
            "peft_config: Seer cannot roll out a model with adapters",
            hint="train the full model, or merge_and_unload() the adapter before training",
        )
    for setting in ("is_fsdp_enabled", "is_deepspeed_enabled"):
        if getattr(trainer, setting, False):
            raise ConfigError(
                f"{setting}: Seer cannot read weights that are spread over ranks",
                hint="use plain data parallelism (DDP)",
            )


def tensors_of(trainer: Any) -> dict[str, Any]:
    """The model's tensors by their Hugging Face names; a tied head is named once."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def stamp_of(trainer: Any) -> tuple[int, str]:
    """Changes when the weights do: the step, and a sample of every tensor (a trainer may be trained twice)."""
    from seer.engine.local.weights import fingerprint

    return trainer.state.global_step, fingerprint(tensors_of(trainer))


def write_model_folder(trainer: Any) -> Path:
    """A model folder in shared memory with the trainer's weights, configuration and tokenizer.

    It is named after the configuration: vLLM finds what it has compiled by the model's path, too, and would compile for
    every training anew.
    """
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors_of(trainer).items()}
    model = trainer.accelerator.unwrap_model(trainer.model)
    config = json.dumps(model.config.to_dict() | {"architectures": [_architecture(model)]}, default=str)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    folder = make_shared_folder("seer-model", num_bytes, named_after=config.encode())
    try:
        (folder / "config.json").write_text(config)
        trainer.processing_class.save_pretrained(folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except BaseException:
        remove_shared_folder(folder)
        raise
    return folder


def _architecture(model: Any) -> str:
    """The model's class name; accelerate and TRL may have put classes of their own over it."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith("transformers.models."):
            return kind.__name__
    return type(model).__name__
