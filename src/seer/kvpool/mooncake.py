# SPDX-License-Identifier: Apache-2.0
"""The pool on Mooncake Store: many machines, or one where Mooncake is already in use.

Workers attach to an owner process on their machine through shared memory (mooncake_servers.py starts it), or
reach owners elsewhere over TCP. Mooncake is a cache that promises less than base.py; this file makes up for it:

  * put returning 0 does not mean that the block stays: a later get may miss, and the caller computes it again
  * a get that takes longer than the block's lease (`lease_ms`) fails for a block that is there, as on a busy machine or
    from SSD: it is tried again
  * a failure is a negative number, which Python takes for true, or an exception: every answer is compared with 1, 0 or
    the exact size, and an exception is a miss
  * put on a held key keeps the old bytes: keys name content and weights version, so the old bytes are the right ones
  * remove skips leased blocks silently: every removal is forced
  * nothing is checked: each block carries its length, key and checksum (mooncake_record.py)
  * a call with the master down blocks 4.3 s: calls have a deadline, and after a failure none is made for a
    while (bounded.py)
  * unknown names in setup are ignored: setup by position, its return code checked
  * a forked child hangs for good: it is refused

Invariants: those of base.py, less two
  1. Pins only decide which blocks `free` drops: Mooncake evicts pinned blocks too when it is full.
  2. Pins are known only to the process that made them. `free` in another process does not drop these blocks;
     eviction or the end of the weights version does.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from seer.errors import ConfigError, DeadlineExceeded, MissingExtra, PoolError, SeerError
from seer.kvpool.base import Buffers, Owners, PoolStats, PoolTroubles, owners_of
from seer.kvpool.bounded import BoundedCalls
from seer.kvpool.keys import KeyArray, Keys, as_key_array
from seer.kvpool.mooncake_metrics import read_tiers
from seer.kvpool.mooncake_record import (
    FOOTER_BYTES,
    Unsealed,
    drop_mark,
    names,
    seal,
    unseal,
    weights_version_of,
    weights_version_pattern,
)
from seer.kvpool.offload import Offload
from seer.kvpool.offloaded_calls import OffloadedCalls
from seer.kvpool.tally import Tally

T = TypeVar("T")
_STRIDE_ALIGN = 4096  # a page: rows of the staging memory do not share one
_SETUP_DEADLINE_S = 20.0  # connecting maps shared memory and asks the master, which may be starting
_LOCAL_BUFFER_BYTES = 16 << 20  # Mooncake's own buffer; our bytes go through the staging memory
_UNREACHABLE = (-900, -600)  # master gone, client not set up
_LEASE_EXPIRED = -707  # before the bytes had come: the block may have been evicted on the way
_LEASE_TRIES = 3
"""Further ones. Measured: with a lease of 1 ms every read fails, though the block is there; with 2 s none of 40."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakePoolConfig:
    """How to reach a Mooncake store from this process."""

    block_bytes: int
    """Largest block."""

    owner_address: str = ""
    """host:port of the owner process on this machine: attach to it through shared memory."""

    master_address: str = ""
    """host:port of the master, where no owner is on this machine: bytes go over TCP."""

    metrics_address: str = ""
    """host:port of the master's metrics page: with it `stats` has what the store holds, tier by tier."""

    host: str = "127.0.0.1"
    """Over TCP: the address of this machine that owners can reach."""

    staging_blocks: int = 32
    """Blocks of shared memory this process moves bytes through; a batch is cut to half of it."""

    deadline_s: float = 2.0
    """No call waits longer."""

    retry_s: float = 5.0
    """No call is made for this long after a failure."""

    num_threads: int = 2

    def __post_init__(self) -> None:
        if bool(self.owner_address) == bool(self.master_address):
            raise ConfigError("mooncake needs either owner_address (shared memory) or master_address (TCP)")
        if self.block_bytes < 1 or self.staging_blocks < 2:
            raise ConfigError(
                f"mooncake block_bytes={self.block_bytes}, staging_blocks={self.staging_blocks}: too small"
            )


class MooncakePool(OffloadedCalls):
    """A client of a Mooncake store."""

    name = "mooncake"

    def __init__(self, config: MooncakePoolConfig) -> None:
        self.config = config
        self._pid = os.getpid()
        self._stride = -(-(config.block_bytes + FOOTER_BYTES) // _STRIDE_ALIGN) * _STRIDE_ALIGN
        self._calls = BoundedCalls("seer-mooncake", config.num_threads, config.deadline_s, config.retry_s)
        self._offload = Offload("seer-pool", config.num_threads)
        self._store: Any = self._calls.call(self._connect, what="connecting to Mooncake", deadline_s=_SETUP_DEADLINE_S)
        self._staging: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        for staging in self._map_staging():
            self._staging.put(staging)
        self._pins: defaultdict[str, set[bytes]] = defaultdict(set)
        self._dropped: set[int] = set()
        self._lock = threading.Lock()
        self._tally = Tally()

    # hot calls

    def lookup_now(self, keys: Keys) -> int:
        """Count the leading keys that are held."""
        self._check_usable()
        wanted = names(as_key_array(keys))
        if not wanted:
            return 0
        with self._tally.timed("lookup"):
            held = self._answer(lambda: self._store.batch_is_exist(wanted), len(wanted), "lookup")
        return next((i for i, answer in enumerate(held) if answer != 1), len(held))

    def put_now(self, keys: Keys, buffers: Buffers, owners: Owners = None) -> list[bool]:
        """Store one block per key, True where Mooncake took it."""
        self._check_usable()
        array, blocks = as_key_array(keys), _rows(buffers)
        _same_number(array, blocks)
        for block in blocks:
            if not 0 < block.nbytes <= self.config.block_bytes:
                raise ValueError(f"a block of {block.nbytes} bytes does not fit {self.config.block_bytes}")
        done: list[bool] = []
        with self._tally.timed("put"):
            for start in range(0, len(array), self._batch):
                part = slice(start, start + self._batch)
                done += self._put_batch(array[part], blocks[part])
        requests = owners_of(owners)
        if requests:
            each = requests if len(requests) > 1 else requests * len(array)
            with self._lock:
                for request, key, held in zip(each, array, done, strict=True):
                    if held:
                        self._pins[request].add(bytes(key))
        self._tally.add(put=sum(done), refused=len(done) - sum(done))
        return done

    def get_now(self, keys: Keys, buffers: Buffers) -> list[bool]:
        """Fill one buffer per key, False where it is a miss."""
        self._check_usable()
        array, blocks = as_key_array(keys), _rows(buffers)
        _same_number(array, blocks)
        done: list[bool] = []
        with self._tally.timed("get"):
            for start in range(0, len(array), self._batch):
                part = slice(start, start + self._batch)
                done += self._get_batch(array[part], blocks[part])
        got = sum(b.nbytes for b, hit in zip(blocks, done, strict=True) if hit)
        self._tally.add(hit=sum(done), miss=len(done) - sum(done), bytes_got=got)
        return done

    # requests, weights versions

    def pin(self, request_id: str, keys: Keys) -> int:
        """Note the leading run of held keys as this request's; the header says what that means here."""
        array = as_key_array(keys)
        held = self.lookup_now(array)
        if held:
            with self._lock:
                self._pins[request_id].update(bytes(k) for k in array[:held])
        return held

    def release(self, request_id: str) -> int:
        """Forget the request's pins."""
        self._check_usable()
        with self._lock:
            return len(self._pins.pop(request_id, set()))

    def free(self, request_id: str) -> int:
        """Drop the blocks that only this request had pinned in this process."""
        self._check_usable()
        with self._lock:
            mine = self._pins.pop(request_id, set())
            others = set().union(*self._pins.values()) if self._pins else set()
        mine_alone = names(as_key_array(sorted(mine - others)))
        if not mine_alone:
            return 0
        answers = self._answer(lambda: self._store.batch_remove(mine_alone, True), len(mine_alone), "free")
        freed = sum(answer == 0 for answer in answers)
        self._tally.add(freed=freed)
        return freed

    def prefetch(self, keys: Keys) -> None:
        """A lookup in the background: it renews the blocks' lease, and a block on SSD is promoted by being
        asked for.
        """
        self._check_usable()
        wanted = names(as_key_array(keys))
        if wanted:
            self._calls.start(lambda: self._store.batch_is_exist(wanted))

    def drop_weights_version(self, weights_version: int) -> int:
        """Purge a weights version by force, and leave a mark that makes every process refuse its later puts."""
        self._check_usable()
        with self._lock:
            self._dropped.add(weights_version)
            for request, pinned in list(self._pins.items()):
                pinned -= {k for k in pinned if int.from_bytes(k[:8], "little") == weights_version}
                if not pinned:  # else a request that ended in another process would stay for ever
                    del self._pins[request]

        def purge() -> int:
            # The mark first: a put that begins after this call returns finds it.
            if self._store.put(drop_mark(weights_version), b"dropped") != 0:
                return -1
            return int(self._store.remove_by_regex(weights_version_pattern(weights_version), True))

        try:
            removed = self._call(purge, f"dropping weights version {weights_version}", 5 * self.config.deadline_s)
        except DeadlineExceeded as error:
            raise PoolError(str(error), hint="is the master running?") from None
        if removed < 0:
            raise PoolError(
                f"Mooncake did not purge weights version {weights_version} (code {removed})",
                hint="is the master running?",
            )
        self._tally.add(freed=removed)
        return removed

    def remove_all(self) -> None:
        """Empty the store, for all processes."""
        self._check_usable()
        code = self._call(lambda: self._store.remove_all(True), "emptying the store")
        if code < 0:
            raise PoolError(f"Mooncake did not empty the store (code {code})", hint="is the master running?")
        with self._lock:
            self._dropped.clear()
            self._pins.clear()

    # the pool itself

    def stats(self) -> PoolStats:
        """What this process has done, and what the whole store holds where the master's metrics page is known."""
        stats = self._tally.stats(self.name)
        if not self.config.metrics_address:
            return stats
        tiers = read_tiers(self.config.metrics_address, self.config.deadline_s)
        return stats if tiers is None else msgspec.structs.replace(stats, **msgspec.structs.asdict(tiers))

    def troubles(self) -> PoolTroubles:
        """All failures: Mooncake does not count them."""
        return self._tally.troubles()

    def close(self) -> None:
        """Leave the store; its contents stay with the owner."""
        if self._store is None:
            return
        store, self._store = self._store, None
        if os.getpid() != self._pid:
            return
        self._offload.close()
        # Closing takes about a second when all is well and longer when not: do not wait for it.
        self._calls.start(store.close)
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # moving bytes

    @property
    def _batch(self) -> int:
        return self.config.staging_blocks // 2

    def _put_batch(self, keys: KeyArray, blocks: list[NDArray[np.uint8]]) -> list[bool]:
        named, weights_versions = names(keys), [weights_version_of(k) for k in keys]
        marks = sorted(set(weights_versions))
        asked = [*map(drop_mark, marks), *named]
        present = self._answer(lambda: self._store.batch_is_exist(asked), len(asked), "put")
        if any(answer not in (0, 1, _FAILED) for answer in present[: len(marks)]):  # the last was counted already
            self._calls.breaker.trip()
            self._tally.add(failed=1)
        dropped = {e for e, answer in zip(marks, present, strict=False) if answer != 0} | self._dropped
        held = [a == 1 and e not in dropped for a, e in zip(present[len(marks) :], weights_versions, strict=True)]
        self._tally.add(duplicate=sum(held))
        todo = [i for i in range(len(named)) if not held[i] and weights_versions[i] not in dropped]
        if not todo or (staging := self._borrow_staging()) is None:
            return held
        sizes = [seal(row, blocks[i], bytes(keys[i])) for row, i in zip(staging, todo, strict=False)]
        pointers, wanted = [row.ctypes.data for row in staging[: len(todo)]], [named[i] for i in todo]
        answers, in_time = self._answer_in_staging(
            lambda: self._store.batch_put_from(wanted, pointers, sizes), len(todo), "put", staging
        )
        if in_time:
            self._staging.put(staging)
        for i, answer in zip(todo, answers, strict=True):
            held[i] = answer == 0
            self._tally.add(bytes_put=blocks[i].nbytes * held[i])
        return held

    def _get_batch(self, keys: KeyArray, blocks: list[NDArray[np.uint8]]) -> list[bool]:
        named, staging = names(keys), self._borrow_staging()
        if staging is None:
            return [False] * len(named)
        pointers, sizes = [row.ctypes.data for row in staging[: len(named)]], [self._stride] * len(named)
        answers, in_time = self._answer_in_staging(
            lambda: self._store.batch_get_into(named, pointers, sizes), len(named), "get", staging
        )
        answers = list(answers)
        for _ in range(_LEASE_TRIES):
            late = [i for i, answer in enumerate(answers) if answer == _LEASE_EXPIRED]
            if not late or not in_time:
                break
            again, in_time = self._get_again(late, named, pointers, staging)
            for i, answer in zip(late, again, strict=True):
                answers[i] = answer
        if not in_time:  # the staging may still be written to: its content is undefined
            return [False] * len(named)
        self._tally.add(failed=answers.count(_LEASE_EXPIRED))
        try:
            rows = zip(staging, answers, blocks, keys, strict=False)
            found = [unseal(row, answer, block, bytes(key)) for row, answer, block, key in rows]
        finally:
            self._staging.put(staging)
        corrupt = [name for name, one in zip(named, found, strict=True) if one is Unsealed.CORRUPT]
        if corrupt:
            self._tally.add(corrupt=len(corrupt))
            self._answer(lambda: self._store.batch_remove(corrupt, True), len(corrupt), "dropping corrupt blocks")
        return [one is Unsealed.GOOD for one in found]

    def _get_again(
        self, late: list[int], named: list[str], pointers: list[int], staging: NDArray[np.uint8]
    ) -> tuple[Sequence[int], bool]:
        """Get some blocks of a batch once more, to the same places: fewer of them take less time."""
        wanted, places = [named[i] for i in late], [pointers[i] for i in late]
        sizes = [self._stride] * len(late)
        return self._answer_in_staging(
            lambda: self._store.batch_get_into(wanted, places, sizes), len(late), "get", staging
        )

    def _borrow_staging(self) -> NDArray[np.uint8] | None:
        """A stretch of staging memory; None when late calls hold it all."""
        try:
            return self._staging.get(timeout=self.config.deadline_s)
        except queue.Empty:
            self._tally.add(failed=1)
            return None

    def _answer_in_staging(
        self, call: Callable[[], Sequence[int]], num: int, what: str, staging: NDArray[np.uint8]
    ) -> tuple[Sequence[int], bool]:
        """`_answer`, and whether the call has ended. If not, the staging comes back when it does."""
        late = False

        def give_back() -> None:
            self._staging.put(staging)

        try:
            answers = self._call(call, f"{what} in Mooncake", when_late=give_back)
        except DeadlineExceeded:
            late = True
            answers = []
        except PoolError:
            answers = []
        return self._checked(answers, num), not late

    def _answer(self, call: Callable[[], Sequence[int]], num: int, what: str) -> Sequence[int]:
        """What Mooncake answered, one number per key; all `_FAILED` when it could not be asked."""
        try:
            answers = self._call(call, f"{what} in Mooncake")
        except (PoolError, DeadlineExceeded):
            answers = []
        return self._checked(answers, num)

    def _call(
        self,
        call: Callable[[], T],
        what: str,
        deadline_s: float | None = None,
        when_late: Callable[[], None] | None = None,
    ) -> T:
        """Make a call; an exception of the library is a PoolError."""
        try:
            return self._calls.call(call, what=what, deadline_s=deadline_s, when_late=when_late)
        except SeerError:
            raise
        except Exception as error:  # the edge: what the library may raise is written nowhere
            self._calls.breaker.trip()
            raise PoolError(f"{what}: {type(error).__name__}: {error}") from error

    def _checked(self, answers: Sequence[int], num: int) -> Sequence[int]:
        if len(answers) == num and not any(answer in _UNREACHABLE for answer in answers):
            return answers
        if answers:
            self._calls.breaker.trip()
        self._tally.add(failed=1)
        return [_FAILED] * num

    # set-up

    def _connect(self) -> Any:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else 17 lines on stderr per client
        try:
            module = importlib.import_module("mooncake.store")
        except ImportError as error:
            if "libibverbs" in str(error):
                raise PoolError(str(error), hint="apt-get install libibverbs1") from None
            raise MissingExtra("mooncake-transfer-engine-non-cuda", "mooncake") from None
        store = module.MooncakeDistributedStore()
        config = self.config
        if config.owner_address:
            where = f"owner at {config.owner_address}"
            staging = config.staging_blocks * self._stride
            code = store.setup_dummy(staging + _LOCAL_BUFFER_BYTES, _LOCAL_BUFFER_BYTES, config.owner_address)
        else:  # by position: unknown names would be ignored
            where = f"master at {config.master_address}"
            code = store.setup(config.host, "P2PHANDSHAKE", 0, _LOCAL_BUFFER_BYTES, "tcp", "", config.master_address)
        if code != 0:  # and never touch the store again: some calls on it would crash the process
            raise PoolError(
                f"cannot attach to the Mooncake {where} (code {code})",
                hint="start it with `seer pool up --backend mooncake`",
            )
        return store

    def _map_staging(self) -> list[NDArray[np.uint8]]:
        """Two stretches of memory that Mooncake may read and write, so that two calls can be under way."""
        total = self.config.staging_blocks * self._stride
        if self.config.owner_address:
            pointer = self._store.alloc_from_mem_pool(total)
            if not pointer:
                raise PoolError(f"Mooncake gave no {total} bytes of staging memory")
            memory = (ctypes.c_uint8 * total).from_address(pointer)
            staging = np.frombuffer(memoryview(memory).cast("B"), np.uint8)
        else:
            staging = np.zeros(total, np.uint8)
            pointer = staging.ctypes.data
        if self._store.register_buffer(pointer, total) != 0:
            raise PoolError(f"Mooncake did not register {total} bytes of staging memory")
        rows, half = staging.reshape(self.config.staging_blocks, self._stride), self._batch
        return [rows[:half], rows[half : 2 * half]]

    def _check_usable(self) -> None:
        if self._store is None:
            raise PoolError("this pool is closed")
        if os.getpid() != self._pid:
            raise PoolError("this pool was opened by the parent process", hint="use spawn: Mooncake hangs after a fork")


_FAILED = -(1 << 30)  # not one of Mooncake's codes: the call was not answered


def _rows(buffers: Buffers) -> list[NDArray[np.uint8]]:
    """Each buffer as flat bytes, sharing its memory."""
    return [_flat(buffer) for buffer in buffers]


def _flat(buffer: Any) -> NDArray[np.uint8]:
    if hasattr(buffer, "data_ptr"):  # a tensor of torch: numpy lacks some of its types, so by address
        if not buffer.is_contiguous() or buffer.device.type != "cpu":
            raise TypeError("a buffer must be contiguous and in host memory")
        memory = (ctypes.c_uint8 * (buffer.numel() * buffer.element_size())).from_address(buffer.data_ptr())
        return np.frombuffer(memoryview(memory).cast("B"), np.uint8)
    return np.frombuffer(memoryview(buffer).cast("B"), np.uint8)


def _same_number(keys: KeyArray, blocks: list[NDArray[np.uint8]]) -> None:
    if len(keys) != len(blocks):
        raise ValueError(f"as many buffers as keys are needed: {len(blocks)} for {len(keys)}")
