"""Packed matrices that the instances of a machine share, process by process.

Packing copies every matrix into another order, and one copy per process is most of what a CPU instance weighs.
Here the first process to need a matrix packs it into a file in shared memory and the others map that file. Two
that pack the same one at the same time both finish; one file stays and both map it, so nobody waits.

The folder belongs to whoever starts the instances (seer.hosting.fleet) and goes with it.

Invariants
  1. A file under its final name is whole: it is written under another name and linked at the end.
  2. Matrices are found under the files they were made from, told apart by path, inode, size and time of change.
  3. Where sharing fails for any reason (no room above all) a matrix is packed privately: only memory differs.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from seer.engine.local import huge_pages
from seer.engine.local.cpu_ops import PanelLinear, fill_panels, panels_shape, to_panels
from seer.engine.local.ops import Linear

log = logging.getLogger(__name__)

LEAST_BYTES = 1 << 20
"""Smaller matrices are not worth a file."""
ROOM_LEFT = 0.5
"""Of the shared memory, for others: the KV pool lives there too."""


class SharedMatrices:
    """The matrices of one set of weights, in the order in which they are asked for."""

    def __init__(self, home: Path, files: Sequence[Path]) -> None:
        self._folder = home / _identity(files)
        self._count = 0
        with suppress(OSError):
            for other in home.iterdir():
                if other != self._folder:  # older weights: who still uses them has them mapped
                    shutil.rmtree(other, ignore_errors=True)
            self._folder.mkdir(exist_ok=True)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> Linear:
        """The next matrix; others have asked for the same ones in the same order."""
        path = self._folder / str(self._count)
        self._count += 1
        try:
            panels = self._shared(path, weight)
        except OSError as error:
            log.info("matrix %s is not shared: %s", path.name, error)
            panels = to_panels(weight)
        return PanelLinear(panels, bias, len(weight))

    def _shared(self, path: Path, weight: torch.Tensor) -> torch.Tensor:
        shape = panels_shape(weight)
        num_bytes = shape.numel() * weight.element_size()
        if num_bytes < LEAST_BYTES:
            return to_panels(weight)
        if not path.exists():
            usage = shutil.disk_usage(self._folder)
            if usage.free - num_bytes < usage.total * ROOM_LEFT:
                raise OSError(f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB of shared memory are free")
            self._make(path, weight, shape, num_bytes)
        return _map(path, shape)

    def _make(self, path: Path, weight: torch.Tensor, shape: torch.Size, num_bytes: int) -> None:
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            with draft.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # or writing to the map could kill the process
            fill_panels(_map(draft, shape), weight)
            with suppress(FileExistsError):  # another process was faster
                os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def _map(path: Path, shape: torch.Size) -> torch.Tensor:
    panels = torch.from_file(str(path), shared=True, size=shape.numel(), dtype=torch.float32).view(shape)
    huge_pages.ask(panels.data_ptr(), panels.nbytes)
    return panels


def _identity(files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        status = file.stat()
        digest.update(repr((str(file.resolve()), status.st_ino, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()
