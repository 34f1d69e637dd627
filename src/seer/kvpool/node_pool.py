# SPDX-License-Identifier: Apache-2.0
"""The pool as one node of several sees it: shared memory of the node, the near tier, over a store between all nodes.

A block that is put goes to both. A block is read from the near tier if it is there; otherwise from the store, and is
then kept near for the node's other instances. So a request that moves inside its node never touches the network.

Invariants: those of base.py, with these
  1. A block is held while one of the two holds it; a failure of one is a miss of that one alone.
  2. What `take_far_reads` returns counts every block that the store gave, once. A store may have had it on this node.
  3. Pins of the near tier belong to the request, those of the store to this process (mooncake.py).
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import msgspec
import numpy as np

from seer.kvpool.base import Buffers, Owners, Pool, PoolStats, PoolTroubles
from seer.kvpool.keys import KeyArray, Keys, as_key_array
from seer.kvpool.offload import Offload
from seer.kvpool.offloaded_calls import OffloadedCalls
from seer.kvpool.tally import Tally


class FarReads(NamedTuple):
    """KV that came from the store between nodes."""

    num_bytes: int = 0
    seconds: float = 0.0


NO_FAR_READS = FarReads()


@runtime_checkable
class ReadsFar(Protocol):
    """A pool that knows what came from other nodes."""

    def take_far_reads(self) -> FarReads:
        """What was read from the store since the last call."""


def take_far_reads(pool: Pool) -> FarReads:
    """What a pool has read from other nodes since the last call; nothing for one that is on this machine alone."""
    return pool.take_far_reads() if isinstance(pool, ReadsFar) else NO_FAR_READS


class NodePool(OffloadedCalls):
    """A near pool over a far one."""

    name = "node"

    def __init__(self, near: Pool, far: Pool, *, num_threads: int = 2) -> None:
        self.near = near
        self.far = far
        self._offload = Offload("seer-node-pool", num_threads)
        self._tally = Tally()
        self._lock = threading.Lock()
        self._far_reads = NO_FAR_READS
        self._is_closed = False

    # hot calls

    def lookup_now(self, keys: Keys) -> int:
        """Count the leading keys that are held, near or far."""
        array, held = as_key_array(keys), 0
        with self._tally.timed("lookup"):
            while True:  # the tiers may take turns along a prefix
                near = self.near.lookup_now(array[held:])
                held += near
                if held == len(array):
                    return held
                far = self.far.lookup_now(array[held:])
                held += far
                if held == len(array) or not far:
                    return held

    def put_now(self, keys: Keys, buffers: Buffers, owners: Owners = None) -> list[bool]:
        """Store one block per key in both tiers, True where one of them holds it."""
        array = as_key_array(keys)
        with self._tally.timed("put"):
            near = self.near.put_now(array, buffers, owners)
            far = self.far.put_now(array, buffers, owners)
        done = [a or b for a, b in zip(near, far, strict=True)]
        self._tally.add(put=sum(done), refused=len(done) - sum(done))
        return done

    def get_now(self, keys: Keys, buffers: Buffers) -> list[bool]:
        """Fill one buffer per key, from the near tier where it can."""
        array = as_key_array(keys)
        with self._tally.timed("get"):
            done = self.near.get_now(array, buffers)
            missing = [i for i, hit in enumerate(done) if not hit]
            if missing:
                for i, hit in zip(missing, self._get_far(array, buffers, missing), strict=True):
                    done[i] = hit
        got = sum(_num_bytes(buffers[i]) for i, hit in enumerate(done) if hit)
        self._tally.add(hit=sum(done), miss=len(done) - sum(done), bytes_got=got)
        return done

    def _get_far(self, keys: KeyArray, buffers: Buffers, missing: list[int]) -> list[bool]:
        """Read blocks from the store, and keep them near."""
        wanted, into = keys[missing], [buffers[i] for i in missing]
        began_s = time.perf_counter()
        found = self.far.get_now(wanted, into)
        seconds = time.perf_counter() - began_s
        hits = [i for i, hit in enumerate(found) if hit]
        if hits:
            num_bytes = sum(_num_bytes(into[i]) for i in hits)
            with self._lock:
                before = self._far_reads
                self._far_reads = FarReads(before.num_bytes + num_bytes, before.seconds + seconds)
            self.near.put_now(wanted[hits], [into[i] for i in hits])
        return found

    def take_far_reads(self) -> FarReads:
        """What was read from the store since the last call."""
        with self._lock:
            reads, self._far_reads = self._far_reads, NO_FAR_READS
        return reads

    # requests, weights versions

    def pin(self, request_id: str, keys: Keys) -> int:
        """Keep the leading run of held keys for this request."""
        array = as_key_array(keys)
        return max(self.near.pin(request_id, array), self.far.pin(request_id, array))

    def release(self, request_id: str) -> int:
        """Undo the request's pins and keep its blocks while there is room."""
        return max(self.near.release(request_id), self.far.release(request_id))

    def free(self, request_id: str) -> int:
        """Undo the request's pins and drop the blocks no other request has pinned."""
        return max(self.near.free(request_id), self.far.free(request_id))

    def prefetch(self, keys: Keys) -> None:
        """A hint to both tiers."""
        self.near.prefetch(keys)
        self.far.prefetch(keys)

    def drop_weights_version(self, weights_version: int) -> int:
        """Drop every block of a weights version from both tiers; returns how many the fuller one had."""
        return max(self.near.drop_weights_version(weights_version), self.far.drop_weights_version(weights_version))

    # the pool itself

    def stats(self) -> PoolStats:
        """What this process has done; `dram_*` are those of the store between nodes, where it says."""
        far, troubles = self.far.stats(), self.troubles()
        return msgspec.structs.replace(
            self._tally.stats(self.name),
            block_bytes=self.near.stats().block_bytes,
            dram_bytes=far.dram_bytes,
            dram_capacity_bytes=far.dram_capacity_bytes,
            num_failed=troubles.num_failed,
            num_corrupt=troubles.num_corrupt,
        )

    def troubles(self) -> PoolTroubles:
        """Those of both tiers."""
        near, far = self.near.troubles(), self.far.troubles()
        return PoolTroubles(num_failed=near.num_failed + far.num_failed, num_corrupt=near.num_corrupt + far.num_corrupt)

    def close(self) -> None:
        """Leave both."""
        if self._is_closed:
            return
        self._is_closed = True
        self._offload.close()
        self.near.close()
        self.far.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _num_bytes(buffer: Any) -> int:
    return int(buffer.nbytes) if hasattr(buffer, "nbytes") else int(np.asarray(memoryview(buffer)).nbytes)
