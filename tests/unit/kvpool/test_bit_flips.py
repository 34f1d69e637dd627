# SPDX-License-Identifier: Apache-2.0
"""Bits flip in the arena, the SSD file and the index: every flip is noticed or harmless, and no wrong byte
comes back.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from seer.errors import PoolError
from seer.kvpool import _arena
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig

BLOCK_BYTES = 4096
NUM_DRAM, NUM_SSD = 6, 10
NUM_HELD = 12
TRUTH = np.random.default_rng(5).integers(0, 256, (NUM_HELD, BLOCK_BYTES), dtype=np.uint8)
KEYS = [(3).to_bytes(8, "little") + bytes([n]) * 24 for n in range(NUM_HELD)]


@pytest.fixture
def config(tmp_path: Path) -> LocalPoolConfig:
    return LocalPoolConfig(
        block_bytes=BLOCK_BYTES,
        dram_bytes=NUM_DRAM * BLOCK_BYTES,
        ssd_bytes=NUM_SSD * BLOCK_BYTES,
        ssd_dir=str(tmp_path),
        dram_dir=str(tmp_path),
        name=uuid.uuid4().hex,
        keeper=False,
        populate=False,
        promote=False,
        deadline_s=1.0,
    )


@pytest.fixture
def pool(config: LocalPoolConfig) -> Iterator[LocalPool]:
    with LocalPool(config) as opened:
        yield opened
        opened.close(remove=True)


class Memory:
    """The arena's file, mapped by somebody who means harm."""

    def __init__(self, pool: LocalPool) -> None:
        with open(pool._files.arena, "r+b") as file:
            self.bytes = mmap.mmap(file.fileno(), 0)
        self.regions = pool._open_arena().regions()

    def flip(self, offset: int, bit: int) -> None:
        self.bytes[offset] ^= 1 << bit


def refill(pool: LocalPool) -> None:
    assert all(pool.put_now(KEYS, TRUTH, "r"))


def read_all(pool: LocalPool) -> list[bool]:
    """Get every block; whatever is reported as a hit must be right."""
    out = np.zeros_like(TRUTH)
    hits = pool.get_now(KEYS, out)
    for n, hit in enumerate(hits):
        assert not hit or np.array_equal(out[n], TRUTH[n]), f"block {n} came back wrong"
    return hits


def noticed(pool: LocalPool) -> int:
    stats = pool.stats()
    return stats.num_corrupt + stats.num_repaired


def test_a_flip_in_a_block_in_memory_is_found_counted_and_dropped(pool: LocalPool) -> None:
    refill(pool)
    memory, rng = Memory(pool), np.random.default_rng(1)
    for n, key in enumerate(KEYS):
        place = pool._open_arena().locate(key)
        assert place is not None
        if place["dram_offset"] is None:
            continue
        before = pool.stats().num_corrupt
        memory.flip(place["dram_offset"] + int(rng.integers(BLOCK_BYTES)), int(rng.integers(8)))
        assert read_all(pool)[n] is False
        assert pool.stats().num_corrupt == before + 1
        assert pool._open_arena().locate(key) is None
        refill(pool)
    assert pool._open_arena().problems() == []


def test_a_flip_in_the_ssd_file_is_found_counted_and_dropped(pool: LocalPool) -> None:
    refill(pool)
    descriptor, rng, flipped = os.open(pool._files.slab(), os.O_RDWR), np.random.default_rng(2), 0
    for n, key in enumerate(KEYS):
        place = pool._open_arena().locate(key)
        assert place is not None
        if place["ssd_offset"] is None:
            continue
        at = place["ssd_offset"] + int(rng.integers(BLOCK_BYTES))
        os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 1 << int(rng.integers(8))]), at)
        assert read_all(pool)[n] is False
        flipped += 1
        assert pool.stats().num_corrupt == flipped
    os.close(descriptor)
    assert flipped >= NUM_HELD - NUM_DRAM


def test_zeroed_and_swapped_pages_are_found(pool: LocalPool) -> None:
    refill(pool)
    memory, arena = Memory(pool), pool._open_arena()
    in_dram = [n for n, key in enumerate(KEYS) if arena.locate(key)["dram_offset"] is not None]  # type: ignore[index]
    offsets = [arena.locate(KEYS[n])["dram_offset"] for n in in_dram[:3]]  # type: ignore[index]
    a, b, c = (offset for offset in offsets if offset is not None)
    memory.bytes[a : a + BLOCK_BYTES] = bytes(BLOCK_BYTES)
    saved = memory.bytes[b : b + BLOCK_BYTES]
    memory.bytes[b : b + BLOCK_BYTES] = memory.bytes[c : c + BLOCK_BYTES]
    memory.bytes[c : c + BLOCK_BYTES] = saved
    hits = read_all(pool)
    assert [hits[n] for n in in_dram[:3]] == [False] * 3
    assert pool.stats().num_corrupt == 3


def test_a_bad_copy_in_memory_is_replaced_by_the_good_one_on_ssd(pool: LocalPool) -> None:
    refill(pool)
    memory, arena = Memory(pool), pool._open_arena()
    on_ssd = [n for n, key in enumerate(KEYS) if arena.locate(key)["dram_offset"] is None]  # type: ignore[index]
    assert arena.promote(KEYS[on_ssd[0]]) == 1
    place = arena.locate(KEYS[on_ssd[0]])
    assert place is not None
    assert place["dram_offset"] is not None
    assert place["ssd_offset"] is not None
    memory.flip(place["dram_offset"] + 17, 3)
    assert read_all(pool)[on_ssd[0]] is True
    assert pool.stats().num_corrupt == 1
    assert pool._open_arena().problems() == []


def test_every_bit_of_an_entry_that_says_what_or_where_is_guarded(pool: LocalPool) -> None:
    """Key, checksum, generation, length, check and the packed word: 72 bytes, 576 single flips."""
    for bit in range(72 * 8):
        refill(pool)
        n = bit % NUM_HELD
        place = pool._open_arena().locate(KEYS[n])
        assert place is not None
        before = noticed(pool)
        Memory(pool).flip(place["entry_offset"] + bit // 8, bit % 8)
        hits = read_all(pool)
        assert noticed(pool) > before, f"flip of bit {bit} of an entry went unnoticed"
        assert sum(hits) >= NUM_HELD - 1, "a flip in one entry cost another one its block"
        assert pool._open_arena().problems() == []


def test_every_bit_of_the_hash_is_guarded(pool: LocalPool) -> None:
    refill(pool)
    start, length = Memory(pool).regions["cells"]
    for bit in range(length * 8):
        before = noticed(pool)
        memory = Memory(pool)
        memory.flip(start + bit // 8, bit % 8)
        assert read_all(pool) == [True] * NUM_HELD, "a flip in the hash cost a block"
        if noticed(pool) == before:  # a cell nobody came by: still as it was flipped, and found when looked for
            assert pool._open_arena().problems() != []
            memory.flip(start + bit // 8, bit % 8)
        assert pool._open_arena().problems() == []


@pytest.mark.parametrize("region", ["owners", "free", "buckets", "totals", "pins", "entries"])
def test_flips_in_what_is_derived_cost_no_block_and_give_no_wrong_byte(pool: LocalPool, region: str) -> None:
    """Links, counts, owners, free lists: after a flip the pool goes on and everything it returns is right."""
    rng = np.random.default_rng(7)
    for _ in range(150):
        refill(pool)
        memory = Memory(pool)
        start, length = memory.regions[region]
        if region == "entries":  # only the derived half: list links and the pin chain
            length //= 128
            offset = start + int(rng.integers(length)) * 128 + 88 + int(rng.integers(16))
        else:
            offset = start + int(rng.integers(min(length, 1024)))
        memory.flip(offset, int(rng.integers(8)))
        pool._open_arena().spill(2, False)
        hits = read_all(pool)
        assert all(hits), "a flip in derived data cost a block"
        pool._open_arena().promote(b"".join(KEYS))
        pool.free("r")
        assert read_all(pool).count(True) <= NUM_HELD
        pool._open_arena().rebuild()
        assert pool._open_arena().problems() == []
        pool.drop_weights_version(4)  # nothing of that weights version; walks everything once


def test_flips_in_the_header_are_refused_when_opening(config: LocalPoolConfig, pool: LocalPool) -> None:
    memory = Memory(pool)
    start, length = memory.regions["config"]
    for bit in range(0, length * 8, 7):
        memory.flip(start + bit // 8, bit % 8)
        with pytest.raises(PoolError, match=r"damaged|version|before the last boot"):
            _arena.Arena(str(pool._files.arena), pool._files.slab(), 1.0, False)
        memory.flip(start + bit // 8, bit % 8)
    _arena.Arena(str(pool._files.arena), pool._files.slab(), 1.0, False)


def test_the_check_of_a_packed_word_misses_no_flip_of_one_or_two_bits() -> None:
    assert _arena.word_check_survivors() == (0, 0)
