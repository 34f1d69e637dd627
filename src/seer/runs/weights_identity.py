# SPDX-License-Identifier: Apache-2.0
"""A name for the content of weights, so that a run is not resumed or verified with others.

Of a model folder: config.json, generation_config.json and every safetensors file; of a file: the file. Neither the
path nor the times of files count: a folder that was moved or copied keeps its name.

Files of up to FULL_BYTES are read whole: 269 MB of SmolLM2 take 0.45 s of a CPU core. Of larger ones the header, the
size, and the beginning, middle and end of every tensor are read. A training step changes nearly every value, so that is
enough to tell its weights from those before it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from seer.errors import InputError
from seer.machine.given_files import open_given
from seer.machine.safetensors_header import MAX_HEADER_BYTES, parse_header

FULL_BYTES = 512 << 20
"""A second of a CPU core, of a start that takes several."""
SAMPLE_BYTES = 4096
"""A page: reading less costs as much."""
NO_WEIGHTS = "none"
"""Of an engine without a model."""
_SETTINGS = ("config.json", "generation_config.json")


def weights_identity(source: Path | None) -> str:
    """The name of a model folder's weights, or of a file's; None is an engine without a model."""
    if source is None:
        return NO_WEIGHTS
    digest = hashlib.sha256()
    try:
        for path in _files(source):
            status = path.stat()
            digest.update(f"{path.name}|{status.st_size}|".encode())
            digest.update(_content(path, status.st_size, status.st_mtime_ns, status.st_ino))
    except OSError as error:
        raise InputError(f"{error.filename} cannot be read: {error.strerror}", hint="are the weights there?") from None
    return digest.hexdigest()[:32]


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    settings = [source / name for name in _SETTINGS if (source / name).exists()]
    return [*settings, *sorted(source.glob("*.safetensors"))]


@lru_cache(maxsize=1024)  # a start asks several times; the last two arguments tell a file that was written since
def _content(path: Path, size: int, mtime_ns: int, inode: int) -> bytes:
    with open_given(path) as file:
        if size <= FULL_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        digest = hashlib.sha256()
        for sample in _samples(file, path, size):
            digest.update(sample)
        return digest.digest()


def _samples(file: BinaryIO, path: Path, size: int) -> Iterator[bytes]:
    """The header of a safetensors file, and parts of each tensor."""
    header_bytes = int.from_bytes(file.read(8), "little")
    header = file.read(header_bytes) if header_bytes <= MAX_HEADER_BYTES else b""
    tensors = list(parse_header(header, source=str(path)).values())
    yield header
    for tensor in tensors:
        begin, end = tensor.data_offsets
        last = max(begin, end - SAMPLE_BYTES)
        for offset in (begin, (begin + last) // 2, last):
            if 0 <= offset < size:  # a wrong header is found when the weights are read
                yield os.pread(file.fileno(), min(SAMPLE_BYTES, max(0, end - offset)), 8 + header_bytes + offset)
