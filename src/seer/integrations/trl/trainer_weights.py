# SPDX-License-Identifier: Apache-2.0
"""The trainer's weights for the instances, passed through shared memory.

The instances load a model folder, which the first rollout writes from the trainer's model into shared memory. What the
trainer holds then (for example a checkpoint it resumed from) is weights version 0.

Plain parameters are handed over as they are. Weights that exist only while they are read, those of adapters that are
merged and of tensors that are gathered from all ranks, go into a file in shared memory one part at a time: no
copies are kept while instances restart.

Invariants
  1. Names and shapes are a checkpoint's, those that `save_pretrained` would write.
  2. Once the other ranks have begun to gather, this one gathers to the end, whatever fails.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seer.engine.staged_weights import make_shared_folder, remove_shared_folder
from seer.integrations.trl.adapters import adapter_state, has_adapters, refuse_unmergeable, without_peft
from seer.integrations.trl.checkpoint_layout import CheckpointLayout, layout_of, transformers_class
from seer.integrations.trl.model_parts import Part, parts_of, saved_below
from seer.integrations.trl.ranks import tell_others
from seer.integrations.trl.sharding import (
    gathering,
    is_sharded,
    model_of,
    refuse_other_sharding,
    shard_of,
)
from seer.integrations.trl.weights_file import layout_bytes, write_one_by_one

WEIGHTS_FILE = "model.safetensors"
GATHER = "gather"
"""The duty of the other ranks when weights that are spread over them are read."""


def refuse_unreadable(trainer: Any) -> None:
    """Refuse a model whose weights cannot be read.

    Some adapters, some ways to spread tensors over ranks, and tensors that a checkpoint joins to others.
    """
    refuse_other_sharding(trainer)
    refuse_unmergeable(trainer.model)
    _plan(trainer)


def are_as_held(trainer: Any) -> bool:
    """Whether the rollout's weights are the tensors that the trainer holds, or views of them."""
    model = model_of(trainer)
    return not (has_adapters(model) or is_sharded(model)) and _plan(trainer)[1].are_views


def tensors_of(trainer: Any) -> dict[str, Any]:
    """Of weights that are as the trainer holds them, the tensors by a checkpoint's names."""
    parts, layout = _plan(trainer)
    return {name: tensor for part in parts for name, tensor in layout.tensors(part.copy(_as_it_is)).items()}


def stamp_of(trainer: Any) -> tuple[int, str]:
    """Changes when the weights do: the step, and a sample of every tensor (a trainer may be trained twice)."""
    from seer.engine.local.weights import fingerprint

    model = model_of(trainer)
    held = fingerprint({name: shard_of(tensor) for name, tensor in saved_below(model)})
    return trainer.state.global_step, hashlib.blake2b((held + adapter_state(model)).encode()).hexdigest()


def write_model_folder(trainer: Any) -> Path:
    """A model folder in shared memory with the trainer's weights, configuration and tokenizer.

    It is named after the configuration: vLLM finds what it has compiled by the model's path, too, and would compile for
    every training anew.
    """
    parts, layout = _plan(trainer)
    names = {name for part in parts for name in part.like}
    config = json.dumps(_config(without_peft(model_of(trainer)), names), default=str)
    with _new_folder("seer-model", layout, named_after=config.encode()) as folder:
        (folder / "config.json").write_text(config)
        trainer.processing_class.save_pretrained(folder)
        _write(trainer, parts, layout, folder / WEIGHTS_FILE)
    return folder


def write_weights(trainer: Any) -> Path:
    """A folder in shared memory with the trainer's weights alone, in one file."""
    parts, layout = _plan(trainer)
    with _new_folder("seer-weights", layout) as folder:
        _write(trainer, parts, layout, folder / WEIGHTS_FILE)
    return folder


def gather_too(trainer: Any) -> None:
    """What other ranks do when the main rank reads weights that are spread over them."""
    whole = gathering(trainer.accelerator.device)
    for part in parts_of(model_of(trainer)):
        part.copy(whole)


def _plan(trainer: Any) -> tuple[list[Part], CheckpointLayout]:
    """What is read of the model, and what becomes of it."""
    model = model_of(trainer)
    parts = list(parts_of(model))
    return parts, layout_of(without_peft(model), parts)


@contextmanager
def _new_folder(kind: str, layout: CheckpointLayout, *, named_after: bytes | None = None) -> Iterator[Path]:
    """A folder in shared memory with room for the tensors; it is removed if it cannot be filled."""
    folder = make_shared_folder(kind, layout_bytes(layout.like), named_after=named_after)
    try:
        yield folder
    except BaseException:
        remove_shared_folder(folder)
        raise


def _write(trainer: Any, parts: list[Part], layout: CheckpointLayout, path: Path) -> None:
    copies = _copies(trainer, parts)
    try:
        write_one_by_one(path, layout.like, _named(copies, layout))
    finally:
        # The other ranks gather to the end, and wait for this one, once they have begun.
        if is_sharded(model_of(trainer)) and inspect.getgeneratorstate(copies) != inspect.GEN_CREATED:
            for _ in copies:
                pass


def _named(copies: Iterator[tuple[Part, Any]], layout: CheckpointLayout) -> Iterator[tuple[str, Any]]:
    for part, copied in copies:
        yield from layout.tensors(part.tensors(copied)).items()


def _copies(trainer: Any, parts: list[Part]) -> Generator[tuple[Part, Any]]:
    is_spread = is_sharded(model_of(trainer))
    if is_spread:
        tell_others(trainer, GATHER)
    whole = gathering(trainer.accelerator.device) if is_spread else _copied
    for part in parts:
        # A parameter by itself is only read, so it needs no copy; a layer is merged in place.
        yield part, part.copy(whole if is_spread or part.layer is not None else _as_it_is)


def _as_it_is(parameter: Any) -> Any:
    return parameter.detach()


def _copied(parameter: Any) -> Any:
    return parameter.detach().clone()


def _config(model: Any, names: set[str]) -> dict[str, Any]:
    """The configuration; `names` are the model's own."""
    architecture = (transformers_class(model) or type(model)).__name__
    config: dict[str, Any] = model.config.to_dict() | {"architectures": [architecture]}
    if config.get("tie_word_embeddings") and "lm_head.weight" in names:
        config["tie_word_embeddings"] = False  # an adapter has changed one of the two
    return config
