# SPDX-License-Identifier: Apache-2.0
"""A pool of its own for a test, gone afterwards: a local one in a folder, or a real Mooncake store."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from seer.kvpool import supervise
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig
from seer.kvpool.serve import ServeSpec, ServeState


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


@contextlib.contextmanager
def an_engine_pool(folder: Path, model: Path, *, block_size: int, num_blocks: int) -> Iterator[LocalPool]:
    """A pool for blocks of the embedded engine in float32, as many in DRAM as on SSD."""
    import torch

    from seer.engine.local.cache import block_bytes
    from seer.engine.local.model_config import read_config

    size = block_bytes(read_config(model), block_size, torch.float32)
    with a_local_pool(folder, block_bytes=size, dram_blocks=num_blocks, ssd_blocks=num_blocks) as opened:
        yield opened


def needs_mooncake() -> None:
    """Skip the test where Mooncake is not installed, or its wheel cannot be loaded without the system's libibverbs."""
    reason = "needs `pip install 'seer-rollout[mooncake]'` and the system package libibverbs1"
    pytest.importorskip("mooncake.store", reason=reason, exc_type=ImportError)


@contextlib.contextmanager
def a_mooncake_store() -> Iterator[ServeState]:
    needs_mooncake()
    name = f"test-{uuid.uuid4().hex[:8]}"
    spec = ServeSpec(
        backend="mooncake",
        name=name,
        dram_dir="/dev/shm",
        dram_bytes=64 << 20,
    )
    state = supervise.start(spec)
    try:
        yield state
    finally:
        os.kill(state.pid, signal.SIGCONT)  # a test may have stopped it
        supervise.stop(state)
