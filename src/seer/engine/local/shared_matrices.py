# SPDX-License-Identifier: Apache-2.0
"""Packed matrices that the processes of one machine share.

Packing copies every matrix into another order. One copy per process is most of the memory of a CPU instance. Here the
first process that needs a matrix packs it into a file in shared memory, and the others map that file. If two processes
pack the same matrix at the same time, both finish, one file stays and both map it: no process waits for another.

seer.hosting.fleet makes the folder and removes it.

Invariants
  1. A file under its final name is complete: it is written under another name and linked at the end.
  2. The packed matrices of a set of weight files are found by the files' path, inode, size and modification time.
  3. If sharing fails for any reason (usually lack of room), the matrix is packed privately. Only memory use differs.
     Sharing also fails for a folder that other users can open, and for a file that is not of this user alone.
  4. Only folders that hold matrices, known by their names, are removed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from seer.engine.local import huge_pages
from seer.engine.local.cpu_ops import PanelLinear, fill_panels, panels_shape, to_panels
from seer.engine.local.ops import Linear
from seer.errors import SeerError
from seer.machine import private_files

log = logging.getLogger(__name__)

LEAST_BYTES = 1 << 20
"""Smaller matrices are packed privately: they save too little for a file."""
ROOM_LEFT = 0.5
"""Share of the shared memory that must stay free: the KV pool is there too."""
_IDENTITY = re.compile(r"[0-9a-f]{32}")


class SharedMatrices:
    """The matrices of one set of weights, numbered in the order of the calls of `linear`."""

    def __init__(self, home: Path, files: Sequence[Path]) -> None:
        self._folder = home / _identity(files)
        self._count = 0
        try:
            private_files.check_folder(home)
            for other in home.iterdir():
                # Older weights: a process that still uses them has them mapped.
                if other != self._folder and _IDENTITY.fullmatch(other.name):
                    shutil.rmtree(other, ignore_errors=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            private_files.check_folder(self._folder)
        except (OSError, SeerError) as error:
            log.warning("matrices are not shared between processes: %s", error)
            self._can_share = False
        else:
            self._can_share = True

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False) -> Linear:
        """The next matrix. Every process calls this for the same matrices in the same order."""
        path = self._folder / str(self._count)
        self._count += 1
        try:
            panels = self._shared(path, weight)
        except (OSError, SeerError) as error:
            log.info("matrix %s is not shared: %s", path.name, error)
            panels = to_panels(weight)
        return PanelLinear(panels, bias, len(weight))

    def _shared(self, path: Path, weight: torch.Tensor) -> torch.Tensor:
        shape = panels_shape(weight)
        num_bytes = shape.numel() * weight.element_size()
        if num_bytes < LEAST_BYTES or not self._can_share:
            return to_panels(weight)
        if not path.exists():
            usage = shutil.disk_usage(self._folder)
            if usage.free - num_bytes < usage.total * ROOM_LEFT:
                raise OSError(f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB of shared memory are free")
            self._make(path, weight, shape, num_bytes)
        return _map(path, shape)

    def _make(self, path: Path, weight: torch.Tensor, shape: torch.Size, num_bytes: int) -> None:
        draft = path.with_suffix(f".{secrets.token_hex(8)}")
        try:
            with open(private_files.create(draft), "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # without room, writing to the map kills the process
            fill_panels(_map(draft, shape), weight)
            with suppress(FileExistsError):  # another process was faster
                os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def _map(path: Path, shape: torch.Size) -> torch.Tensor:
    private_files.check_file(path)  # the folder is this user's alone: nothing else can take the file's place now
    panels = torch.from_file(str(path), shared=True, size=shape.numel(), dtype=torch.float32).view(shape)
    huge_pages.ask(panels.data_ptr(), panels.nbytes)
    return panels


def _identity(files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        status = file.stat()
        digest.update(repr((str(file.resolve()), status.st_ino, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()
