# SPDX-License-Identifier: Apache-2.0
"""A trainer's model as the tensors that a rollout needs: Hugging Face names, adapters merged, one part at a time.

Invariants
  1. The names are those of the model without peft and without what wraps layers for training; a tied head is named
     once. A head that was tied and computes with other weights than the embedding, because an adapter changed one of
     them, is named too.
  2. Each name is in one part, with the shape and the type that it is read with.
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
    """Tensors of the model that are read together: one parameter, or a layer with its adapter."""

    like: dict[str, Any]
    """By name, the parameters as the model holds them."""
    layer: Any = None
    """With an adapter to merge."""
    name: str = ""
    """The layer's."""

    def copy(self, whole: Whole) -> Any:
        """What is read of the model: where its tensors are spread over ranks, all of them call this together."""
        if self.layer is not None:
            return copy_of(self.layer, whole)
        return {name: whole(parameter) for name, parameter in self.like.items()}

    def tensors(self, copied: Any) -> dict[str, Any]:
        """The tensors by name, of such a copy; each rank by itself."""
        if self.layer is None:
            found: dict[str, Any] = copied
            return found
        base = merged(copied, name=self.name)
        named = {_join(self.name, name): parameter.detach() for name, parameter in base.named_parameters()}
        return {name: named[name] for name in self.like}


def parts_of(model: Any) -> Iterator[Part]:
    """Every part of a model, in the order of its parameters."""
    yield from _walk(without_peft(model), "", has_adapters(model), set())


def _walk(module: Any, name: str, may_be_adapted: bool, seen: set[object]) -> Iterator[Part]:
    if may_be_adapted:
        module = in_use(module)
        if is_adapted(module):
            base = module.get_base_layer()
            if must_merge(module):
                yield from _adapted(module, base, name, seen)
                return
            module = base
    for own, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield Part({_join(name, own): parameter})
    for own, child in module.named_children():
        yield from _walk(child, name if own in WRAPPERS else _join(name, own), may_be_adapted, seen)


def _adapted(layer: Any, base: Any, name: str, seen: set[object]) -> Iterator[Part]:
    like = {}
    for own, parameter in base.named_parameters():
        key = (identity(layer), own)
        if key not in seen:
            seen.add(key)
            like[_join(name, own)] = parameter
    if like:
        yield Part(like, layer, name)


def _join(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own
