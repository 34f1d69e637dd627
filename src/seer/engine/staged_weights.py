"""Weights as a path that other processes can open: a given path, tensors in shared memory, or handles of GPU tensors.

Staged weights are kept until the next version replaces them: a restarted instance opens them again.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seer.engine.base import Weights
from seer.engine.gpu_handles import SUFFIX, write_handles
from seer.errors import MissingExtra

log = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
"""Where Linux mounts shared memory."""
_PREFIX = "seer-weights"
"""Starts the folder names, then the process id; `_remove_orphans` looks for it."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Weights as a path that every process of this machine can open."""

    path: Path
    home: Path | None = None
    """The folder that `stage` made, removed by `discard`; None for a path of the user's."""

    def discard(self) -> None:
        """Remove the files; processes that have opened them keep them."""
        if self.home is not None:
            shutil.rmtree(self.home, ignore_errors=True)


def stage_in_place(weights: Mapping[str, Any]) -> StagedWeights:
    """Stage tensors on a GPU without copying them: the file holds handles."""
    home = make_shared_folder(_PREFIX, 0)
    path = home / f"model{SUFFIX}"
    try:
        write_handles(weights, path)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    return StagedWeights(path, home)


def stage(weights: Weights) -> StagedWeights:
    """Stage a path as it is, and tensors as a file in shared memory."""
    if not isinstance(weights, Mapping):
        return StagedWeights(Path(weights).resolve())
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise MissingExtra("safetensors", "local") from None
    home = make_shared_folder(_PREFIX, sum(tensor.nbytes for tensor in weights.values()))
    path = home / "model.safetensors"
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}, path)
    return StagedWeights(path, home)


def make_shared_folder(prefix: str, num_bytes: int) -> Path:
    """A new folder in shared memory, or on disk with a warning if `num_bytes` do not fit there."""
    if _SHARED_MEMORY.is_dir():
        _remove_orphans(f"{prefix}-")
        free_bytes = shutil.disk_usage(_SHARED_MEMORY).free
        if free_bytes > num_bytes:
            return Path(tempfile.mkdtemp(prefix=f"{prefix}-{os.getpid()}-", dir=_SHARED_MEMORY))
        log.warning(
            "%s has %.1f GiB free, the weights need %.1f GiB: they go through %s; enlarge it (docker run --shm-size)",
            _SHARED_MEMORY,
            free_bytes / 2**30,
            num_bytes / 2**30,
            tempfile.gettempdir(),
        )
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-"))


def has_shared_memory() -> bool:
    """Whether this machine has /dev/shm."""
    return _SHARED_MEMORY.is_dir()


def _remove_orphans(prefix: str) -> None:
    """Free the memory of processes that were killed: a folder's name carries its process id."""
    for folder in _SHARED_MEMORY.glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            log.warning("removing %s: its process is gone", folder)
            shutil.rmtree(folder, ignore_errors=True)
