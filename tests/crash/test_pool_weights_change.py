# SPDX-License-Identifier: Apache-2.0
"""The weights change while instances read and write: no reader ever gets a block of a weights version that was
dropped.
"""

from __future__ import annotations

import mmap
import multiprocessing
import time
import uuid
from pathlib import Path

import numpy as np

from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig

BLOCK_BYTES = 8 << 10
NUM_BLOCKS = 32
NUM_EPOCHS = 40
DEADLINE_S = 60


def key_of(weights_version: int, block: int) -> bytes:
    return weights_version.to_bytes(8, "little") + block.to_bytes(8, "little") + bytes(16)


def block_of(weights_version: int, block: int) -> np.ndarray:
    """Equal blocks of different weights versions differ in every byte, so a stale one cannot pass."""
    return np.full(BLOCK_BYTES, (weights_version * NUM_BLOCKS + block) % 251, np.uint8)


class Board:
    """Shared: the weights version in force, the last one dropped, and what the processes saw."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.cells = np.frombuffer(self._map, np.int64)

    CURRENT, DROPPED, STOP, STALE, WRONG, HITS, LATE = range(7)


def work(config: LocalPoolConfig, board_path: str, seed: int) -> None:
    pool = LocalPool.attach(config.name, config.dram_dir, keeper=seed == 0, populate=False)
    board, rng = Board(board_path).cells, np.random.default_rng(seed)
    tally = board[8 + 8 * seed : 16 + 8 * seed]
    while not board[Board.STOP]:
        weights_version, dropped = int(board[Board.CURRENT]), int(board[Board.DROPPED])
        blocks = [int(b) for b in rng.integers(NUM_BLOCKS, size=8)]
        pool.put_now(
            [key_of(weights_version, b) for b in blocks],
            [block_of(weights_version, b) for b in blocks],
            f"request {seed}",
        )
        out = np.zeros((8, BLOCK_BYTES), np.uint8)
        for b, hit, got in zip(
            blocks, pool.get_now([key_of(weights_version, b) for b in blocks], out), out, strict=True
        ):
            tally[Board.HITS] += hit
            tally[Board.WRONG] += hit and not np.array_equal(got, block_of(weights_version, b))
        if dropped:  # a straggler that still believes in the old weights
            old = [key_of(dropped, b) for b in blocks]
            tally[Board.LATE] += sum(pool.put_now(old, [block_of(dropped, b) for b in blocks]))
            tally[Board.STALE] += sum(pool.get_now(old, out)) + sum(pool.lookup_now([k]) for k in old)
        if rng.random() < 0.1:
            pool.free(f"request {seed}")
    pool.close()


def test_not_one_stale_hit_while_the_weights_version_changes_under_load(tmp_path: Path) -> None:
    board_path = tmp_path / "board"
    board_path.write_bytes(bytes(8 * 64))
    board = Board(str(board_path)).cells
    config = LocalPoolConfig(
        block_bytes=BLOCK_BYTES,
        dram_bytes=12 * BLOCK_BYTES,  # a third of a weights version: blocks move between the tiers all the time
        ssd_bytes=3 * NUM_BLOCKS * BLOCK_BYTES,
        ssd_dir=str(tmp_path),
        dram_dir=str(tmp_path),
        name=uuid.uuid4().hex,
        keeper=False,
        populate=False,
    )
    deadline = time.monotonic() + DEADLINE_S
    with LocalPool(config) as pool:
        board[Board.CURRENT] = 1
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=work, args=(config, str(board_path), seed)) for seed in range(3)]
        for worker in workers:
            worker.start()
        try:
            for weights_version in range(1, NUM_EPOCHS):
                seen = pool.stats().num_put
                while pool.stats().num_put < seen + 50:  # the load is real before each change
                    assert time.monotonic() < deadline, "the workers do not work"
                    time.sleep(0.001)
                board[Board.CURRENT] = weights_version + 1
                pool.drop_weights_version(weights_version)
                board[Board.DROPPED] = weights_version  # from here on nobody may see it
        finally:
            board[Board.STOP] = 1
            for worker in workers:
                worker.join(timeout=DEADLINE_S)
        assert [w.exitcode for w in workers] == [0] * 3
        tally = board[8:32].reshape(3, 8).sum(axis=0)
        assert tally[Board.STALE] == tally[Board.WRONG] == tally[Board.LATE] == 0
        assert tally[Board.HITS] > 1000
        assert pool._open_arena().problems() == []
        assert pool.stats().num_corrupt == 0
        pool.close(remove=True)
