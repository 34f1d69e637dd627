# SPDX-License-Identifier: Apache-2.0
"""A trainer's model as the tensors that a rollout needs: adapters merged, one part at a time.

Invariants
  1. The names are those of transformers' model in memory, without peft and without what wraps layers for training; a
     tied head is named once. A head that was tied and computes with other weights than the embedding, because an
     adapter changed one of them, is named too. What a checkpoint calls them is in checkpoint_layout.py.
  2. Each name is in one part, with the shape and the type that it is read with. Buffers that a checkpoint keeps, such
     as the bias that corrects the choice of experts, are named like parameters.
  3. Nothing of the model changes.
  4. Every rank has the same parts in the same order, so that they can gather tensors that are spread over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from seer.integrations.trl.adapters import (
    Whole,
    copy_of,
    has_adapters,
    identity,
    in_use,
    is_adapted,
    merged,
    must_merge,
    without_peft,
)

WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
"""What activation checkpointing and torch.compile put between a module and its own name."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of the model that are read together: one by itself, or a layer with its adapter."""

    like: dict[str, Any]
    """By name, the tensors as the model holds them."""
    layer: Any = None
    """With an adapter to merge."""
    name: str = ""
    """The layer's."""

    def copy(self, whole: Whole) -> Any:
        """What is read of the model: where its tensors are spread over ranks, all of them call this together."""
        if self.layer is not None:
            return copy_of(self.layer, whole)
        return {name: whole(tensor) for name, tensor in self.like.items()}

    def tensors(self, copied: Any) -> dict[str, Any]:
        """The tensors by name, of such a copy; each rank by itself."""
        if self.layer is None:
            found: dict[str, Any] = copied
            return found
        base = merged(copied, name=self.name)
        named = {_join(self.name, name): tensor.detach() for name, tensor in saved_below(base)}
        return {name: named[name] for name in self.like}


def parts_of(model: Any) -> Iterator[Part]:
    """Every part of a model, in the order of its modules."""
    yield from _walk(without_peft(model), "", has_adapters(model), set())


def saved_below(module: Any) -> Iterator[tuple[str, Any]]:
    """What a checkpoint keeps of a module and all below it, by the names in memory: parameters and some buffers."""
    for name, below in module.named_modules():
        for own, tensor in _saved(below):
            yield _join(name, own), tensor


def _walk(module: Any, name: str, may_be_adapted: bool, seen: set[object]) -> Iterator[Part]:
    if may_be_adapted:
        module = in_use(module)
        if is_adapted(module):
            base = module.get_base_layer()
            if must_merge(module):
                yield from _adapted(module, base, name, seen)
                return
            module = base
    for own, tensor in _saved(module):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield Part({_join(name, own): tensor})
    for own, child in module.named_children():
        yield from _walk(child, name if own in WRAPPERS else _join(name, own), may_be_adapted, seen)


def _adapted(layer: Any, base: Any, name: str, seen: set[object]) -> Iterator[Part]:
    like = {}
    for own, tensor in saved_below(base):
        key = (identity(layer), own)
        if key not in seen:
            seen.add(key)
            like[_join(name, own)] = tensor
    if like:
        yield Part(like, layer, name)


def _saved(module: Any) -> Iterator[tuple[str, Any]]:
    """What a checkpoint keeps of a module itself."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _join(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own
