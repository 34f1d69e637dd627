# SPDX-License-Identifier: Apache-2.0
"""The protocol of the global KV pool. Backends: `local`, `mooncake`, and one over the other (node_pool.py); `NonePool`
(none.py) holds nothing.

The pool holds blocks of KV bytes by key (see keys.py) so that any instance can continue any request. Calls
are batched; the caller supplies every buffer. A `put`, `get` or `lookup` that fails is a miss, and a miss means that
the caller computes the KV again: it is never an exception in the middle of a rollout. What raises: opening a pool,
using it wrongly (buffers that do not match the keys, a closed pool), and `drop_weights_version`, because old KV that
was not dropped must not go unnoticed.

Each hot call has two forms: a coroutine (`put`, `get`, `lookup`), which never blocks the event loop, and a synchronous
twin with `_now` (`put_now`, ...), for an engine's own step loop.

Invariants. tests/contract/test_pool_contract.py checks 1, 2, 4 and 5 over all of them; tests/unit/kvpool
and tests/property/test_pool_twin.py check 3 and 6.
  1. `get` fills a buffer with exactly the bytes that were put under that key, or reports False. When it
     reports False the buffer's content is undefined and must not be used.
  2. A `put` that reported True is held until it is freed, its weights version is dropped, it is found corrupt, or the
     pool is full and the block is neither pinned nor recently used.
  3. A pinned block is never evicted. Pins belong to the request and not to the process that made them, so they
     outlive it: a request moves between instances, and its KV stays. (`mooncake` promises less here and in 2: see
     its header.)
  4. After `drop_weights_version(v)` returned, no call that starts later hits a block of weights version `v`, and no
     put of one is kept.
  5. `put` of a key that is held changes nothing and reports True: equal keys name equal bytes.
  6. No wait is unbounded: each wait for the pool's lock, for room or for a server ends after the pool's `deadline_s`
     (for `mooncake`: per batch of blocks; five times as long for `drop_weights_version`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, runtime_checkable

import msgspec

from seer.kvpool.keys import Keys

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Buffers: TypeAlias = "Sequence[Any] | NDArray[np.generic]"
"""One buffer per key: anything with the buffer protocol or DLPack that is contiguous and in host memory
(numpy, memoryview, bytearray, a CPU tensor of torch), or one array whose first axis has a row per key."""

Owners: TypeAlias = "str | Sequence[str] | None"
"""The requests that blocks are pinned for: none, one for all blocks, or one per block."""


def owners_of(owners: Owners) -> list[str]:
    """As a list: empty, of one, or as long as there are blocks."""
    return [] if owners is None else [owners] if isinstance(owners, str) else list(owners)


def part_owner(request: str) -> str:
    """Who owns the last block of a request that waits, where it is not full.

    An owner of its own: such a block is of no use once the request goes on, and is freed then.
    """
    return f"{request}/part"


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one kind of call, over all processes that share the pool."""

    num_calls: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    """Upper edges of the power-of-two bucket the percentile falls in."""


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool holds and has done; `local` counts the calls of all its processes, `mooncake` those of this one."""

    backend: str
    block_bytes: int = 0
    """Size of a slot; 0 where blocks have no common size."""
    num_blocks: int = 0
    num_pinned_blocks: int = 0
    dram_bytes: int = 0
    """Bytes of blocks in DRAM now."""
    dram_capacity_bytes: int = 0
    ssd_bytes: int = 0
    """Bytes of blocks on SSD now; a block promoted to DRAM may count in both."""
    ssd_capacity_bytes: int = 0

    num_put: int = 0
    """Blocks accepted, those already held included."""
    num_duplicate: int = 0
    """Of these, blocks already held: nothing was copied."""
    num_refused: int = 0
    """Blocks not accepted: the pool was full of pinned blocks, the weights version was dropped, or a deadline passed.
    """
    num_hit_dram: int = 0
    num_hit_ssd: int = 0
    num_miss: int = 0
    num_corrupt: int = 0
    """Blocks whose checksum did not match when read; each was dropped and reported as a miss."""
    num_spilled: int = 0
    """Blocks copied from DRAM to SSD."""
    num_promoted: int = 0
    """Blocks copied from SSD to DRAM."""
    num_prefetched: int = 0
    """Of these, blocks that `prefetch` asked for; the others were kept in DRAM after a hit."""
    num_evicted: int = 0
    """Blocks dropped to make room; never a pinned one."""
    num_freed: int = 0
    """Blocks dropped because their last request finished or their weights version ended."""
    num_failed: int = 0
    """Calls, or blocks of a call, that the pool could not serve; the caller recomputes."""
    num_repaired: int = 0
    """Times the index was rebuilt: a process died inside it, or damage was found in it."""
    bytes_put: int = 0
    bytes_got: int = 0
    latency: dict[str, Latency] = {}
    """By call: put, get, lookup."""


class PoolTroubles(msgspec.Struct, frozen=True, kw_only=True):
    """Failures that one process counted, where the pool does not count them for all processes."""

    num_failed: int = 0
    """Calls, or blocks of a call, that the pool could not serve."""
    num_corrupt: int = 0
    """Blocks whose checksum did not match."""


@runtime_checkable
class Pool(Protocol):
    """A pool of KV blocks; see the module's header for what every method promises."""

    name: str
    """Name of the backend."""

    async def lookup(self, keys: Keys) -> int:
        """Count the leading keys that are held: the longest prefix that need not be computed."""
        ...

    async def put(self, keys: Keys, buffers: Buffers, owners: Owners = None) -> list[bool]:
        """Store one block per key, True where it is held, and pin them for their owners."""
        ...

    async def get(self, keys: Keys, buffers: Buffers) -> list[bool]:
        """Fill one buffer per key; False is a miss: absent, corrupt, of another size, or the pool failed."""
        ...

    def lookup_now(self, keys: Keys) -> int:
        """`lookup`, in the calling thread."""
        ...

    def put_now(self, keys: Keys, buffers: Buffers, owners: Owners = None) -> list[bool]:
        """`put`, in the calling thread."""
        ...

    def get_now(self, keys: Keys, buffers: Buffers) -> list[bool]:
        """`get`, in the calling thread."""
        ...

    def pin(self, request_id: str, keys: Keys) -> int:
        """Keep the leading run of held keys for this request; returns its length. Pinning twice is pinning
        once.
        """
        ...

    def release(self, request_id: str) -> int:
        """Undo every pin of the request and keep its blocks while there is room; returns how many pins it
        had.
        """
        ...

    def free(self, request_id: str) -> int:
        """The request is finished: undo its pins and drop the blocks no other request has pinned; returns how
        many.
        """
        ...

    def prefetch(self, keys: Keys) -> None:
        """Bring blocks of a request that runs soon from SSD to DRAM, in the background; a hint, never an
        error.
        """
        ...

    def drop_weights_version(self, weights_version: int) -> int:
        """Drop every block of a weights version and refuse its later puts; returns how many blocks went."""
        ...

    def stats(self) -> PoolStats:
        """What the pool holds and has done."""
        ...

    def troubles(self) -> PoolTroubles:
        """What this process alone counts of `stats`' failures; cheap enough for several times a second."""
        ...

    def close(self) -> None:
        """Leave the pool; its blocks stay. A second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
