# SPDX-License-Identifier: Apache-2.0
"""Tensors that FSDP2 spreads over ranks: gathered one at a time, on all ranks together, for the main rank to keep.

Invariants
  1. Gathering changes neither a shard nor the optimizer's view of it.
  2. Every rank makes the same calls in the same order; a rank that is left out would let the others wait.
"""

from __future__ import annotations

from typing import Any

from seer.errors import ConfigError
from seer.integrations.trl.adapters import Whole

WHOLE_STAGES = (0, 1, 2)
"""Stages of DeepSpeed's ZeRO that spread gradients and the optimizer's state, and leave each rank all weights."""


def model_of(trainer: Any) -> Any:
    """The trainer's model without what data parallelism puts around it."""
    return trainer.accelerator.unwrap_model(trainer.model)


def refuse_other_sharding(trainer: Any) -> None:
    """Refuse what spreads weights over ranks in a way that is not read here."""
    if trainer.is_deepspeed_enabled:
        _refuse_other_stages(trainer.accelerator.state.deepspeed_plugin.zero_stage)
    is_fsdp2 = getattr(trainer.accelerator, "is_fsdp2", False)  # which accelerate has since it can do FSDP2
    if trainer.is_fsdp_enabled and not is_fsdp2:
        raise ConfigError(
            "fsdp_config: version 1 of FSDP is not supported",
            hint="fsdp_config={'version': 2}, or fsdp_version: 2 in accelerate's configuration",
        )
    if not is_fsdp2 and is_sharded(model_of(trainer)):
        raise ConfigError(
            "the model's tensors are spread over ranks by something else than FSDP2",
            hint="use FSDP2 (fsdp=True), or plain data parallelism (DDP)",
        )


def _refuse_other_stages(stage: Any) -> None:
    if stage not in WHOLE_STAGES:
        raise ConfigError(
            f"deepspeed: ZeRO stage {stage} is not supported",
            hint="use stage 1 or 2, which keep whole weights on every rank, or FSDP2 (fsdp=True)",
        )


def is_sharded(model: Any) -> bool:
    """Whether tensors of the model are spread over ranks."""
    return any(_is_spread(parameter) for parameter in model.parameters())


def reshard(model: Any) -> None:
    """Give up whole tensors that FSDP2 keeps after a forward pass without a backward one, such as an evaluation's.

    They may be of lower precision than the shards, which are what is trained. On a CPU, FSDP2 fails to free them once
    numpy has seen their memory.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard_of(parameter: Any) -> Any:
    """What this rank holds of a parameter."""
    held = parameter.detach()
    return held.to_local() if _is_spread(held) else held


def gathering(device: Any) -> Whole:
    """Gathers a parameter on all ranks, or copies one that each of them holds."""

    def whole(parameter: Any) -> Any:
        held = parameter.detach()
        if not _is_spread(held):
            return held.clone()
        # Shards that wait in the CPU's memory go to the GPU first: the ranks' group may be one of GPUs alone.
        return (held if held.device.type == device.type else held.to(device)).full_tensor()

    return whole


def _is_spread(tensor: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
