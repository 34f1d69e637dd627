# SPDX-License-Identifier: Apache-2.0
"""Measure how fast a pool is on this machine, beside plain memory copies.

Two processes: this one puts, a child gets into buffers of its own. Each process also copies the same blocks
from private to private memory (memcpy), in turns with the pool: a batch copied, a batch put, and so on, so
that noise on a shared machine hits both alike. A round's time is its median batch times the number of batches: where
other work runs, some batches are interrupted for longer than they take. Ratios are taken within a round.

Invariants
  1. Every get is checked: a miss or a wrong byte ends the measurement.
  2. Blocks are new to the pool in every round; nothing is answered because it was there already.
  3. Every wait for the child has a deadline.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec
import numpy as np
from numpy.typing import NDArray

from seer.errors import DeadlineExceeded, PoolError
from seer.kvpool.base import Pool
from seer.kvpool.keys import KEY_BYTES, KeyArray
from seer.machine.safe_path import without_current_folder

_STEP_DEADLINE_S = 120.0
"""A round takes seconds; a child that is silent for this long hangs."""
_LOOKUP_KEYS = 256
"""Blocks of a request with 16,384 tokens in blocks of 64."""
_LOOKUP_CALLS = 200
"""Enough for a stable median of calls that take microseconds."""
Blocks = NDArray[np.uint8]
OpenPool = Callable[[], Pool]
"""Opens the pool in the process that calls it; must be picklable."""


class Spread(msgspec.Struct, frozen=True):
    """A number measured several times."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Median and range of some values."""
        return cls(statistics.median(values), min(values), max(values))


class PoolSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What one pool did with blocks of one size."""

    backend: str
    block_bytes: int
    batch_blocks: int
    round_bytes: int
    num_rounds: int
    memcpy_bytes_s: Spread
    put_bytes_s: Spread
    get_bytes_s: Spread
    put_to_memcpy: Spread
    """Ratio to memcpy of the same round, in the same process."""
    get_to_memcpy: Spread
    lookup_s: Spread
    """One lookup of 256 held keys."""


def measure_pool(
    open_pool: OpenPool,
    *,
    block_bytes: int,
    round_bytes: int = 256 << 20,
    batch_blocks: int = 16,
    num_rounds: int = 5,
) -> PoolSpeed:
    """Put in this process, get in another; see the header."""
    num_blocks = round_bytes // block_bytes // batch_blocks * batch_blocks
    round_bytes = num_blocks * block_bytes
    source = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    scratch = np.ones_like(source)
    copies: list[float] = []
    puts: list[float] = []
    gets: list[float] = []
    put_ratios: list[float] = []
    get_ratios: list[float] = []
    lookups: list[float] = []
    with open_pool() as pool, _reader(open_pool, num_blocks, block_bytes, batch_blocks) as ask:
        for round_number in range(num_rounds + 1):  # the first one warms up
            weights_version = round_number + 1
            keys = _round_keys(weights_version, num_blocks)
            put_s, copy_s = in_turns(
                num_blocks,
                batch_blocks,
                lambda part, keys=keys: _must(pool, pool.put_now(keys[part], source[part])),  # type: ignore[misc]
                lambda part: copy_blocks(scratch[part], source[part]),
            )
            get_s, reader_copy_s, right = ask(weights_version)
            lookup_s = _lookup_seconds(pool, keys)
            pool.drop_weights_version(weights_version)
            if not right:
                raise PoolError(f"{pool.name}: a block came back wrong")
            if round_number == 0:
                continue
            copies += [round_bytes / copy_s, round_bytes / reader_copy_s]
            puts.append(round_bytes / put_s)
            gets.append(round_bytes / get_s)
            put_ratios.append(copy_s / put_s)
            get_ratios.append(reader_copy_s / get_s)
            lookups.append(lookup_s)
        return PoolSpeed(
            backend=pool.name,
            block_bytes=block_bytes,
            batch_blocks=batch_blocks,
            round_bytes=round_bytes,
            num_rounds=num_rounds,
            memcpy_bytes_s=Spread.of(copies),
            put_bytes_s=Spread.of(puts),
            get_bytes_s=Spread.of(gets),
            put_to_memcpy=Spread.of(put_ratios),
            get_to_memcpy=Spread.of(get_ratios),
            lookup_s=Spread.of(lookups),
        )


def copy_blocks(target: Blocks, source: Blocks) -> None:
    """Copy block by block: the time of a pool that costs nothing."""
    for to, block in zip(target, source, strict=True):
        np.copyto(to, block)


def in_turns(
    num_blocks: int, batch_blocks: int, first: Callable[[slice], None], second: Callable[[slice], None]
) -> tuple[float, float]:
    """Do both to each batch, one after the other; returns the seconds each would take if all were the median
    one.

    The second gets the batch half the blocks away: what one has just read must not be in the cache of the
    other.
    """
    times: tuple[list[float], list[float]] = ([], [])
    starts = range(0, num_blocks - batch_blocks + 1, batch_blocks)
    for i, start in enumerate(starts):
        far = starts[(i + len(starts) // 2) % len(starts)]
        for seconds, work, at in ((times[0], first, start), (times[1], second, far)):
            begin = time.perf_counter()
            work(slice(at, at + batch_blocks))
            seconds.append(time.perf_counter() - begin)
    return statistics.median(times[0]) * len(starts), statistics.median(times[1]) * len(starts)


def _round_keys(weights_version: int, num_blocks: int) -> KeyArray:
    keys = np.random.default_rng(weights_version).integers(0, 256, (num_blocks, KEY_BYTES), dtype=np.uint8)
    keys[:, :8] = np.frombuffer(weights_version.to_bytes(8, "little"), np.uint8)
    return keys


def _must(pool: Pool, done: list[bool]) -> None:
    if not all(done):
        raise PoolError(f"{pool.name} refused or lost a block of the measurement", hint="give it more memory")


def _lookup_seconds(pool: Pool, keys: KeyArray) -> float:
    few = np.ascontiguousarray(np.resize(keys, (_LOOKUP_KEYS, KEY_BYTES)))
    times = []
    for _ in range(_LOOKUP_CALLS):
        start = time.perf_counter()
        held = pool.lookup_now(few)
        times.append(time.perf_counter() - start)
        if held != _LOOKUP_KEYS:
            raise PoolError(f"{pool.name} lost a block of the measurement")
    return statistics.median(times)


@contextmanager
def _reader(
    open_pool: OpenPool, num_blocks: int, block_bytes: int, batch_blocks: int
) -> Iterator[Callable[[int], tuple[float, float, bool]]]:
    """A child that reads a whole round when asked; yields the function that asks it."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(
        target=_read_rounds, args=(theirs, open_pool, num_blocks, block_bytes, batch_blocks), daemon=True
    )
    with without_current_folder():
        child.start()
    theirs.close()

    def receive() -> tuple[float, float, bool]:
        if not mine.poll(_STEP_DEADLINE_S):
            raise DeadlineExceeded("reading a round of blocks", _STEP_DEADLINE_S)
        try:
            answer = mine.recv()
        except EOFError:
            raise PoolError("the reading process died") from None
        if isinstance(answer, str):
            raise PoolError(f"the reading process failed: {answer}")
        return answer  # type: ignore[no-any-return]

    def ask(weights_version: int) -> tuple[float, float, bool]:
        mine.send(weights_version)
        return receive()

    try:
        receive()  # it is open and its memory is mapped
        yield ask
    finally:
        mine.close()
        child.join(timeout=10)
        if child.is_alive():
            child.kill()
            child.join(timeout=10)


def _read_rounds(
    connection: Connection, open_pool: OpenPool, num_blocks: int, block_bytes: int, batch_blocks: int
) -> None:
    source = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    target, scratch = np.ones_like(source), np.ones_like(source)
    try:
        with open_pool() as pool:
            connection.send((0.0, 0.0, True))
            while True:
                try:
                    weights_version = connection.recv()
                except EOFError:
                    return
                keys = _round_keys(weights_version, num_blocks)
                get_s, copy_s = in_turns(
                    num_blocks,
                    batch_blocks,
                    lambda part, keys=keys: _must(pool, pool.get_now(keys[part], target[part])),  # type: ignore[misc]
                    lambda part: copy_blocks(scratch[part], source[part]),
                )
                right = bool(np.array_equal(target, source))
                target[:] = 0
                connection.send((get_s, copy_s, right))
    except Exception as error:  # any error: the parent reports it
        connection.send(f"{type(error).__name__}: {error}")


def fresh_name() -> str:
    """A pool name that is not in use."""
    return f"bench-{uuid.uuid4().hex[:12]}"
