"""Weights on their way to another process: a path as it is, tensors through a file in shared memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from seer.engine.base import Weights
from seer.errors import MissingExtra

_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def weights_as_path(weights: Weights) -> Iterator[Path]:
    """A path that holds the weights for as long as the block runs."""
    if not isinstance(weights, Mapping):
        yield Path(weights)
        return
    try:
        from safetensors.torch import save_file  # noqa: PLC0415 - only tensors need it
    except ImportError:
        raise MissingExtra("safetensors", "local") from None
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="seer-weights-", dir=folder) as home:
        path = Path(home) / "model.safetensors"
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}, path)
        yield path
