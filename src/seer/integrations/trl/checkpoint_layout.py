# SPDX-License-Identifier: Apache-2.0
"""A model's tensors as its checkpoint has them, one part of the model at a time: what `save_pretrained` would write.

Since transformers 5 a model may hold other tensors than its checkpoint, such as all experts of a layer in one. Engines
read checkpoints. transformers undoes its conversions when it saves, and does so here too.

Invariants
  1. Names, shapes and values are those of transformers' own reverse conversion; nothing here knows a family of models.
  2. A model without conversions keeps its names, their order and its tensors, and nothing is called for its tensors.
  3. A tensor whose values lie together in a tensor of the model is a view of it.
  4. A conversion that needs tensors of several parts is refused before a tensor is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from seer.errors import ConfigError
from seer.integrations.trl.model_parts import Part
from seer.integrations.trl.weights_file import Like

HINT = "a model is rolled out if each of its tensors can be written to a checkpoint without the others"


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """The tensors of a checkpoint, known before one is read."""

    like: dict[str, Like]
    """Shapes and types by the checkpoint's names."""
    are_views: bool
    """Whether each of them is a tensor of the model or a contiguous view of one."""
    model: Any
    converted: frozenset[str]
    """The model's names of tensors that the checkpoint has otherwise."""

    def tensors(self, named: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint's tensors, of one part's by the model's names."""
        return named if self.converted.isdisjoint(named) else _reverted(self.model, named)


def layout_of(model: Any, parts: Sequence[Part]) -> CheckpointLayout:
    """The checkpoint of a model of transformers (which may have adapters inside) that is read in these parts."""
    model = _plain(model)
    held = [{name: _meta(like) for name, like in part.like.items()} for part in parts]
    whole = _checked(model, {name: one for named in held for name, one in named.items()})
    like: dict[str, Any] = {}
    converted: set[str] = set()
    for named in held:
        pieces = named
        if any(whole.get(name) is not one for name, one in named.items()):
            pieces = _checked(model, named)
            converted.update(named)
        _refuse_joined(model, named, pieces, whole, like)
        like |= pieces
    if like.keys() != whole.keys():
        raise _refused(model, min(whole.keys() - like.keys()), "it joins several tensors of the model")
    return CheckpointLayout(
        like={name: Like(tuple(one.shape), one.dtype) for name, one in like.items()},
        are_views=_are_views(like, held),
        model=model,
        converted=frozenset(converted),
    )


def transformers_class(model: Any) -> type | None:
    """The model's class in transformers; accelerate, FSDP2 and TRL may have put classes of their own over it."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith("transformers.models."):
            return kind
    return None


def _refuse_joined(
    model: Any, named: dict[str, Any], pieces: dict[str, Any], whole: dict[str, Any], before: dict[str, Any]
) -> None:
    """Refuse a part that by itself gives other tensors than with all parts together."""
    for name, one in pieces.items():
        if name in before or name not in whole or whole[name].shape != one.shape:
            raise _refused(model, name, f"{next(iter(named))} is only a part of it, or of another")


def _refused(model: Any, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint's {name} of a {type(model).__name__} cannot be made from one part of the model: {why}",
        hint=HINT,
    )


def _checked(model: Any, named: dict[str, Any]) -> dict[str, Any]:
    try:
        return _reverted(model, named)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        what = f"transformers cannot undo its conversion of {next(iter(named))} (and {len(named) - 1} more)"
        raise ConfigError(f"{what}: {type(error).__name__}: {error}", hint=HINT) from error


def _reverted(model: Any, named: dict[str, Any]) -> dict[str, Any]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return named  # transformers 4 holds what checkpoints have
    with _without_copies():
        found: dict[str, Any] = revert_weight_conversion(model, named)
    return found


def _without_copies() -> AbstractContextManager[Any]:
    """transformers copies each half of a fused tensor before it splits it, but the pieces lie together in the whole."""
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutCopies(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))

    return WithoutCopies()


def _plain(model: Any) -> Any:
    """The model under its class in transformers: conversions are found by it, and not for a class that is over it."""
    kind = transformers_class(model)
    if kind is None or type(model) is kind:
        return model
    plain: Any = object.__new__(kind)
    plain.__dict__ = dict(vars(model))
    return plain


def _meta(like: Any) -> Any:
    import torch

    return torch.empty(tuple(like.shape), dtype=like.dtype, device="meta")


def _are_views(like: dict[str, Any], held: Sequence[dict[str, Any]]) -> bool:
    memory = {_memory(one) for named in held for one in named.values()}
    return all(one.is_contiguous() and _memory(one) in memory for one in like.values())


def _memory(tensor: Any) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found
