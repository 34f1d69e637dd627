# SPDX-License-Identifier: Apache-2.0
"""The pool on one machine, and the default: shared memory over an SSD file, no server, no port.

Every process opens the same files (local_files.py) and works on them directly (csrc/kvpool). The first of them is
the keeper: its background thread spills blocks so that puts find free slots, and takes back what killed processes
held. When it dies another one takes over.

Contents survive the death of any process, and of all of them while the files stay. They do not survive a reboot,
which also ends the run that could use them.

Invariants beyond those of base.py
  1. A call that the arena cannot serve in time is a miss and is counted in `num_failed`, except `drop_weights_version`,
     which raises: that a purge did not happen must not go unnoticed.
  2. Closing waits for the calls that are running, and never removes what other processes use.
  3. A forked child cannot use its parent's pool: its calls raise, and it must open the pool itself.
  4. A process that ends without closing leaves the pool as if it had closed it.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from seer.errors import PoolError
from seer.kvpool import _arena
from seer.kvpool.base import Buffers, Latency, Owners, PoolStats, PoolTroubles, owners_of
from seer.kvpool.keys import Keys, as_key_array
from seer.kvpool.local_files import LocalPoolConfig, PoolFiles, open_files, remove_files
from seer.kvpool.offload import Offload
from seer.kvpool.offloaded_calls import OffloadedCalls

_KEEPER_WAIT_S = 1.0
"""A dead keeper is replaced within about this time."""
T = TypeVar("T")


class LocalPool(OffloadedCalls):
    """A pool in shared memory and on SSD; open the same config, or `attach` by name, in every process."""

    name = "local"

    def __init__(self, config: LocalPoolConfig) -> None:
        self._files, self.created = open_files(config)
        """True when this call made the pool; False when it joined one."""
        self._start(config)

    @classmethod
    def attach(cls, name: str = "default", dram_dir: str = "/dev/shm", **options: Any) -> Self:
        """Join a pool that exists; its sizes come from the pool itself."""
        files = PoolFiles.find(name, dram_dir)
        if files is None or not os.path.lexists(files.arena):
            raise PoolError(f"there is no pool named {name!r} in {dram_dir}", hint="start it with `seer pool up`")
        found = _arena.probe(str(files.arena))
        stride, slab = found["stride_bytes"], files.slab()
        if found["ssd_slots"] and not slab:
            raise PoolError(
                f"pool {name!r} has an SSD tier, and {files.note} names no file of this user for it",
                hint="remove the pool: `seer pool down`",
            )
        config = LocalPoolConfig(
            name=name,
            run=found["run"],
            dram_dir=dram_dir,
            block_bytes=found["slot_bytes"],
            dram_bytes=found["dram_slots"] * stride,
            ssd_bytes=found["ssd_slots"] * stride,
            ssd_dir=os.path.dirname(os.path.dirname(slab)),  # it lies in this user's folder there
            **options,
        )
        self = cls.__new__(cls)
        self._files, self.created = files, False
        self._start(config)
        return self

    def _start(self, config: LocalPoolConfig) -> None:
        self.config = config
        self._arena: _arena.Arena | None = _arena.Arena(
            str(self._files.arena), self._files.slab(), config.deadline_s, config.populate
        )
        self._pid = os.getpid()
        self._num_failed = 0
        self._offload = Offload("seer-pool", config.num_threads)
        self._background = Offload("seer-pool-prefetch", 1)
        self._closing = threading.Event()
        atexit.register(self.close)  # a keeper inside the arena must be gone before the interpreter is
        self._keeper: threading.Thread | None = None
        if config.keeper:
            self._keeper = threading.Thread(target=self._keep, name="seer-pool-keeper", daemon=True)
            self._keeper.start()

    # hot calls

    def lookup_now(self, keys: Keys) -> int:
        """Count the leading keys that are held."""
        array = as_key_array(keys)
        return self._or_failed(0, lambda arena: arena.lookup(array))

    def put_now(self, keys: Keys, buffers: Buffers, owners: Owners = None) -> list[bool]:
        """Store one block per key, True where it is held."""
        array = as_key_array(keys)
        requests = [_digest(owner) for owner in owners_of(owners)]
        return self._or_failed([False] * len(array), lambda arena: arena.put(array, _rows(buffers), requests))

    def get_now(self, keys: Keys, buffers: Buffers) -> list[bool]:
        """Fill one buffer per key, False where it is a miss."""
        array = as_key_array(keys)
        promote = self.config.promote
        return self._or_failed([False] * len(array), lambda arena: arena.get(array, _rows(buffers), promote))

    # requests, weights versions

    def pin(self, request_id: str, keys: Keys) -> int:
        """Keep the leading run of held keys for this request."""
        array = as_key_array(keys)
        return self._or_failed(0, lambda arena: arena.pin(_digest(request_id), array))

    def release(self, request_id: str) -> int:
        """Undo the request's pins and keep its blocks while there is room."""
        return self._or_failed(0, lambda arena: arena.unpin(_digest(request_id), False))

    def free(self, request_id: str) -> int:
        """Undo the request's pins and drop the blocks no other request has pinned."""
        return self._or_failed(0, lambda arena: arena.unpin(_digest(request_id), True))

    def prefetch(self, keys: Keys) -> None:
        """Bring blocks from SSD to DRAM in the background."""
        array = as_key_array(keys)
        self._open_arena()
        self._background.start(self._or_failed, 0, lambda arena: arena.promote(array))

    def drop_weights_version(self, weights_version: int) -> int:
        """Drop every block of a weights version and refuse its later puts."""
        return self._open_arena().drop_weights_version(weights_version)

    # the pool itself

    def stats(self) -> PoolStats:
        """What all processes together hold and have done; `num_failed` adds the calls this one could not
        make.
        """
        counts = self._open_arena().stats()
        return PoolStats(
            backend=self.name,
            block_bytes=self.config.block_bytes,
            num_blocks=counts["num_held"],
            num_pinned_blocks=counts["num_pinned"],
            dram_bytes=counts["dram_bytes"],
            dram_capacity_bytes=self.config.dram_slots * self.config.stride_bytes,
            ssd_bytes=counts["ssd_bytes"],
            ssd_capacity_bytes=self.config.ssd_slots * self.config.stride_bytes,
            num_put=counts["put"],
            num_duplicate=counts["duplicate"],
            num_refused=counts["refused"],
            num_hit_dram=counts["hit_dram"],
            num_hit_ssd=counts["hit_ssd"],
            num_miss=counts["miss"],
            num_corrupt=counts["corrupt"],
            num_spilled=counts["spilled"],
            num_promoted=counts["promoted"],
            num_prefetched=counts["prefetched"],
            num_evicted=counts["evicted"],
            num_freed=counts["freed"],
            num_failed=counts["failed"] + self._num_failed,
            num_repaired=counts["repaired"],
            bytes_put=counts["bytes_put"],
            bytes_got=counts["bytes_got"],
            latency={call: _latency(buckets) for call, buckets in counts["latency"].items()},
        )

    def troubles(self) -> PoolTroubles:
        """Calls that failed before the arena, which counts everything else for all processes."""
        return PoolTroubles(num_failed=self._num_failed)

    def close(self, *, remove: bool = False) -> None:
        """Leave the pool; with `remove` its files are deleted, for all processes."""
        if self._arena is None:
            return
        self._closing.set()
        if os.getpid() == self._pid:
            self._arena.stop_keeping()
            if self._keeper is not None:
                self._keeper.join(timeout=2 * self.config.deadline_s)
            self._background.close()
            self._offload.close()
        self._arena = None
        atexit.unregister(self.close)
        if remove:
            remove_files(self._files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_arena(self) -> _arena.Arena:
        if self._arena is None:
            raise PoolError("this pool is closed")
        if os.getpid() != self._pid:
            raise PoolError("this pool was opened by the parent process", hint="open it after the fork, or use spawn")
        return self._arena

    def _or_failed(self, failed: T, call: Callable[[_arena.Arena], T]) -> T:
        arena = self._open_arena()
        try:
            return call(arena)
        except PoolError:
            self._num_failed += 1
            return failed

    def _keep(self) -> None:
        arena = self._open_arena()
        while not self._closing.is_set():
            try:
                kept = arena.keep(_KEEPER_WAIT_S)
            except PoolError:
                kept = False
            if not kept:  # another process is the keeper, or the lock was not given: look again later
                self._closing.wait(_KEEPER_WAIT_S)


def _digest(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode(), digest_size=16).digest()


def _rows(buffers: Buffers) -> Any:
    """Lists and arrays go as they are; any other sequence becomes a list."""
    return list(buffers) if isinstance(buffers, Sequence) and not isinstance(buffers, (list, tuple)) else buffers


def _latency(buckets: list[int]) -> Latency:
    total = sum(buckets)
    if total == 0:
        return Latency()

    def percentile(share: float) -> float:
        seen = 0
        for power, num in enumerate(buckets):
            seen += num
            if seen >= share * total:
                return float(2**power) * 1e-9
        raise AssertionError("the shares of all buckets add up to one")

    return Latency(num_calls=total, p50_s=percentile(0.5), p99_s=percentile(0.99))
