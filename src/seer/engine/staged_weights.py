# SPDX-License-Identifier: Apache-2.0
"""Weights as a path that other processes can open: a given path, tensors in shared memory, or handles of GPU tensors.

Staged weights are kept until the next version replaces them: a restarted instance opens them again. They lie in this
user's folder in shared memory (seer.machine.private_files), under a lock that the process which staged them holds:
those of a killed process are removed by the next one that stages.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seer.engine.base import Weights
from seer.engine.gpu_handles import SUFFIX, wait_for_gpus, write_handles
from seer.errors import MissingExtra
from seer.machine import owned_folders, private_files

log = logging.getLogger(__name__)

_KIND = "seer-weights"


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Weights as a path that every process of this machine can open."""

    path: Path
    home: Path | None = None
    """The folder that `stage` made, removed by `discard`; None for a path of the user's."""

    def discard(self) -> None:
        """Remove the files; processes that have opened them keep them."""
        if self.home is not None:
            remove_shared_folder(self.home)


def stage_in_place(weights: Mapping[str, Any]) -> StagedWeights:
    """Stage tensors on a GPU without copying them: the file holds handles."""
    home = make_shared_folder(_KIND, 0)
    path = home / f"model{SUFFIX}"
    try:
        write_handles(weights, path)
    except BaseException:
        remove_shared_folder(home)
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
    home = make_shared_folder(_KIND, sum(tensor.nbytes for tensor in weights.values()))
    path = home / "model.safetensors"
    try:
        save_file(_apart(weights), path)
    except BaseException:
        remove_shared_folder(home)
        raise
    return StagedWeights(path, home)


def _apart(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors in this machine's memory, each with bytes of its own, as a file has them.

    Of two names for one tensor, as in the state_dict of a model whose head is tied, the second gets a copy.
    """
    apart: dict[str, Any] = {}
    places: set[int] = set()
    for name, tensor in weights.items():
        held = tensor.detach().contiguous().cpu()
        apart[name] = held.clone() if held.data_ptr() in places else held
        places.add(held.data_ptr())
    return apart


async def stage_in_thread(weights: Weights) -> StagedWeights:
    """`stage`, while the event loop goes on: instances and nodes that do not hear their driver for the time of a lease
    end, and tensors take a second for each gigabyte or so. A cancellation waits for the copy, which it cannot end.
    """
    if not isinstance(weights, Mapping):
        return stage(weights)
    wait_for_gpus(weights)  # their streams are the caller's, and unknown to the thread
    staging = asyncio.ensure_future(asyncio.to_thread(stage, weights))
    try:
        return await asyncio.shield(staging)
    except asyncio.CancelledError:
        (staged,) = await asyncio.gather(staging, return_exceptions=True)
        if isinstance(staged, StagedWeights):
            staged.discard()
        raise


def make_shared_folder(kind: str, num_bytes: int, *, named_after: bytes | None = None) -> Path:
    """A new folder in shared memory, or on disk with a warning if `num_bytes` do not fit there.

    It belongs to this process until `remove_shared_folder`. Folders of killed processes, of any kind, are removed.
    `named_after` is that of `owned_folders.make_folder`.
    """
    remove_orphaned_folders()  # first: what they free may be needed
    if not has_shared_memory():
        return owned_folders.make_folder(kind, tempfile.gettempdir(), named_after=named_after)
    memory = private_files.SHARED_MEMORY
    free_bytes = shutil.disk_usage(memory).free
    if free_bytes > num_bytes:
        return owned_folders.make_folder(kind, memory, named_after=named_after)
    log.warning(
        "%s has %.1f GiB free, the weights need %.1f GiB: they go through %s; enlarge it (docker run --shm-size)",
        memory,
        free_bytes / 2**30,
        num_bytes / 2**30,
        tempfile.gettempdir(),
    )
    return owned_folders.make_folder(kind, tempfile.gettempdir(), named_after=named_after)


def remove_orphaned_folders() -> None:
    """Remove the folders of killed processes, of any kind, in shared memory and among the temporary files."""
    for base in {private_files.SHARED_MEMORY, Path(tempfile.gettempdir())}:
        home = private_files.find_folder(base)
        if home is not None:
            owned_folders.remove_orphans(home)


def remove_shared_folder(folder: Path) -> None:
    """Remove a folder that `make_shared_folder` made."""
    owned_folders.remove_folder(folder)


def has_shared_memory() -> bool:
    """Whether this machine has /dev/shm."""
    return private_files.SHARED_MEMORY.is_dir()
