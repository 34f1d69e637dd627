# SPDX-License-Identifier: Apache-2.0
"""Checks new weights against the model's, and names them for the pool; nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seer.engine.vllm.model_folder import ModelFolder, weights_identity
from seer.errors import InputError

NAMES_HINT = (
    "give what the model's checkpoint has; a model of transformers has other names in memory: "
    "update_weights(revert_weight_conversion(model, model.state_dict())), from transformers.core_model_loading"
)


def identify(folder: ModelFolder, weights: Path) -> str:
    """The identity of weights: a folder, a file, or handles of GPU memory. Refuses those of another model."""
    from seer.engine.local.weights import open_weights

    tensors = open_weights(weights)
    if weights != folder.path:
        _refuse_other_weights(folder, open_weights(folder.path), tensors)
    return weights_identity(folder.path, tensors)


def _refuse_other_weights(folder: ModelFolder, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse weights that lack a tensor of the model: vLLM would keep the old one silently."""
    spare = {"lm_head.weight"} if folder.tied_head else set()
    missing = sorted(set(known) - set(given) - spare)
    if missing:
        other = sorted(set(given) - set(known) - spare)
        instead = f"; the model has no {_first(other)}" if other else ""
        raise InputError(f"the weights lack {_first(missing)}{instead}", hint=NAMES_HINT)
    for name in set(known) - spare:
        if _shape(given, name) != _shape(known, name):
            raise InputError(f"{name} has shape {list(_shape(given, name))}, the model's {list(_shape(known, name))}")


def _first(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _shape(tensors: Mapping[str, Any], name: str) -> tuple[int, ...]:
    # Only the headers of files are read; the tensors may have many gigabytes.
    own = getattr(tensors, "shape", None)
    return own(name) if own is not None else tuple(tensors[name].shape)
