# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters: what a layer computes with, as plain weights.

peft merges an adapter by writing to the layer, and unmerging rounds. Here it merges in a copy of the layer: every kind
of adapter that peft can merge is merged by its own code, and what is trained stays as it is.

Invariants
  1. Nothing of the trainer's model changes: no weight, and none of peft's notes of what is merged.
  2. Merged tensors are, bit for bit, those of peft's `merge_and_unload`.
  3. An adapter that cannot become weights is refused by name before an instance starts, also for a reason that only the
     merge finds: the first rollout merges first.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from seer.errors import ConfigError

Whole = Callable[[Any], Any]
"""Makes a copy of a parameter that is the caller's own, and whole."""

HINT = "use an adapter whose layers peft can merge, such as LoRA, or train the full model"


def has_adapters(model: Any) -> bool:
    """Whether peft has put adapters into the model."""
    return hasattr(model, "peft_config")


def without_peft(model: Any) -> Any:
    """The model of transformers inside peft's; its layers may have adapters."""
    if not has_adapters(model):
        return model
    from peft import PeftMixedModel, PeftModel

    return model.base_model.model if isinstance(model, PeftModel | PeftMixedModel) else model


def refuse_unmergeable(model: Any) -> None:
    """Refuse adapters that no weights can stand for."""
    if not has_adapters(model):
        return
    for config in model.peft_config.values():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if config.is_prompt_learning or kind in ("ADAPTION_PROMPT", "XLORA"):
            raise ConfigError(f"peft_config: {kind} computes what no merged weights can", hint=HINT)
        if getattr(config, "layer_replication", None):
            raise ConfigError("peft_config: layer_replication is not supported", hint="leave it out")
    inner = without_peft(model)
    if getattr(inner, "is_quantized", False) or getattr(inner, "quantization_method", None) is not None:
        raise _refused_quantised()
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in _adapted_layers(inner):
        if type(layer).merge is BaseTunerLayer.merge:
            raise ConfigError(f"peft_config: the {_kind(layer)} of {name} cannot be merged", hint=HINT)
        if not all(weight.is_floating_point() for weight in layer.get_base_layer().parameters()):
            raise _refused_quantised()


def adapter_state(model: Any) -> str:
    """Changes when other adapters are active than before, which changes no parameter."""
    if not has_adapters(model):
        return ""
    return repr([(layer.active_adapters, layer.disable_adapters, layer.merged) for _, layer in _adapted_layers(model)])


def in_use(module: Any) -> Any:
    """The module that computes: peft keeps an original beside one that it trains instead."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    while isinstance(module, AuxiliaryTrainingWrapper):
        if hasattr(module, "token_adapter"):
            module = module.token_adapter
        elif module.disable_adapters or not set(module.active_adapters) & set(module.modules_to_save):
            module = module.original_module
        else:
            module = module.modules_to_save[module.active_adapters[0]]
    return module


def is_adapted(module: Any) -> bool:
    """Whether this is a layer with an adapter around its base layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def must_merge(layer: Any) -> bool:
    """Whether what an adapted layer computes differs from its base layer as it is."""
    return not (layer.disable_adapters or layer.merged) and bool(layer.active_adapters)


def identity(layer: Any) -> int:
    """The same for layers that compute with the same adapter and the same weights: those of a tied head."""
    return id(getattr(layer, "tied_adapter", None) or layer)


def copy_of(layer: Any, whole: Whole) -> Any:
    """A copy of an adapted layer, with parameters of its own."""
    return _twin(layer, whole, {})


def merged(twin: Any, *, name: str) -> Any:
    """The base layer of such a copy, with the active adapters merged into it."""
    import torch

    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's advice for those who keep what it merged
            if hasattr(twin, "unload_and_optionally_merge_module"):
                return twin.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            twin.merge()
            return twin.get_base_layer()
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        what = f"peft_config: the {_kind(twin)} of {name} cannot be merged: {error}"
        raise ConfigError(what, hint=HINT) from error


def _adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if is_adapted(module))


def _kind(layer: Any) -> str:
    """As in `lora.Linear`."""
    return f"{type(layer).__module__.split('.')[-2]}.{type(layer).__name__}"


def _refused_quantised() -> ConfigError:
    return ConfigError(
        "peft_config: the base model is quantised, and merging would round what the trainer does not",
        hint="load the base model in bfloat16 or float32",
    )


def _twin(module: Any, whole: Whole, made: dict[int, Any]) -> Any:
    """A copy of a module and all below it, with parameters of its own; what peft notes in it stays in it."""
    if id(module) not in made:
        made[id(module)] = twin = object.__new__(type(module))
        # Lists and dicts are copied, because a merge writes to them; the rest it only reads.
        twin.__dict__ = {
            name: copy.copy(value) if isinstance(value, dict | list | set) else value
            for name, value in vars(module).items()
        }
        twin._parameters = {name: _own(value, whole) for name, value in module._parameters.items()}
        twin._modules = {
            name: None if child is None else _twin(child, whole, made) for name, child in module._modules.items()
        }
    return made[id(module)]


def _own(parameter: Any, whole: Whole) -> Any:
    import torch

    return None if parameter is None else torch.nn.Parameter(whole(parameter), requires_grad=False)
