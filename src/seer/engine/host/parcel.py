"""Weights on their way to other processes: a path as it is, tensors through a file in shared memory.

A parcel is kept for as long as its epoch is the newest: an instance that is restarted opens it again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from seer.engine.base import Weights
from seer.errors import MissingExtra

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Parcel:
    """Weights as a path that every process of this machine can open."""

    path: Path
    home: Path | None = None
    """A folder of ours, gone when the parcel is discarded."""

    def discard(self) -> None:
        """Nobody will open it again; processes that have it open keep it."""
        if self.home is not None:
            shutil.rmtree(self.home, ignore_errors=True)


def pack(weights: Weights) -> Parcel:
    """Make weights something that can be opened elsewhere."""
    if not isinstance(weights, Mapping):
        return Parcel(Path(weights).resolve())
    try:
        from safetensors.torch import save_file  # noqa: PLC0415 - only tensors need it
    except ImportError:
        raise MissingExtra("safetensors", "local") from None
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    home = Path(tempfile.mkdtemp(prefix="seer-weights-", dir=folder))
    path = home / "model.safetensors"
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}, path)
    return Parcel(path, home)
