"""A local pool of its own for a test, in a folder of its own, gone afterwards."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig


@contextlib.contextmanager
def a_local_pool(folder: Path, *, block_bytes: int, dram_blocks: int, ssd_blocks: int) -> Iterator[LocalPool]:
    config = LocalPoolConfig(
        block_bytes=block_bytes,
        dram_bytes=dram_blocks * block_bytes,
        ssd_bytes=ssd_blocks * block_bytes,
        ssd_dir=str(folder),
        dram_dir=str(folder),
        name=uuid.uuid4().hex,
    )
    opened = LocalPool(config)
    try:
        yield opened
    finally:
        opened.close(remove=True)
