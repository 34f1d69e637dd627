# SPDX-License-Identifier: Apache-2.0
"""Moves KV blocks between a worker's memory and the pool, many at once.

    save   gather all layers of all blocks on the device, one copy to pinned host memory on a stream of its own;
           threads write them to the pool when the copy is complete, each a part of it
    load   threads fill pinned memory from the pool, each a part of it; it is copied and scattered when all is there

A block in the pool is its layers' bytes in order; with tensor parallelism, those of this worker's part. Host memory is
`num_save_buffers` and `num_load_buffers` fixed buffers. When all save buffers are busy for `save_wait_s`, the blocks
are not saved, which is counted; they are computed again if needed.

Invariants
  1. After `save` has returned, work launched on the device may overwrite the blocks.
  2. After a synchronous `load` has returned, work launched on the device sees the blocks. Blocks of an asynchronous
     load are complete when `take_loaded` returns its request.
  3. A block that could not be loaded is returned by `take_failed`, exactly once per load.
  4. Saves and frees reach the pool in the order of their calls.
  5. A load gives its buffers back whatever becomes of it: the loads after it wait for them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from seer.config import TransferOptions
from seer.engine.vllm.connector_parts import KVParts
from seer.engine.vllm.connector_stats import (
    FAR_BYTES,
    FAR_S,
    LOAD_S,
    LOADED_BYTES,
    OVERLAPPED_LOAD_S,
    UNSAVED_BLOCKS,
)
from seer.errors import ConfigError
from seer.kvpool.base import Pool
from seer.kvpool.keys import keys_of_part
from seer.kvpool.node_pool import take_far_reads

if TYPE_CHECKING:
    from seer.engine.vllm.connector_plan import LoadJob, SaveJob


@dataclass(slots=True)
class _HostBuffer:
    """A host buffer [blocks, bytes], pinned where there is a device to copy to."""

    host: torch.Tensor
    ready: Any = None
    """Event of the copy that uses it."""


class BlockTransfer:
    """The worker's side; one per worker."""

    def __init__(self, pool: Pool, options: TransferOptions, *, parts: KVParts | None = None, rank: int = 0) -> None:
        self._pool = pool
        parts = parts or KVParts()
        self._part, self._saves, self._num_ranks = parts.part_of(rank), parts.saves(rank), parts.num_ranks
        self._options = options
        self._layers: list[torch.Tensor] = []
        self._buffer_blocks = 0
        self._save_buffers: queue.SimpleQueue[_HostBuffer] = queue.SimpleQueue()
        self._load_buffers: queue.SimpleQueue[_HostBuffer] = queue.SimpleQueue()
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="seer-kv-save")  # one, which keeps the order
        self._writers = ThreadPoolExecutor(options.save_threads, thread_name_prefix="seer-kv-write")
        self._readers = ThreadPoolExecutor(options.load_threads, thread_name_prefix="seer-kv-read")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="seer-kv-load")
        self._lock = threading.Lock()
        self._loaded: set[str] = set()
        self._failed: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._stats: defaultdict[str, float] = defaultdict(float)  # not reported yet
        self._device = torch.device("cpu")
        self._streams: tuple[Any, Any] | None = None

    def use(self, caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        """Use this KV memory: one tensor per layer, blocks first."""
        self._layers = [_block_bytes_view(cache, num_blocks) for cache in caches]
        self._device = self._layers[0].device
        self.block_bytes = sum(layer.shape[1] for layer in self._layers)
        if self._device.type == "cuda":
            cuda: Any = torch.cuda  # untyped
            self._streams = (cuda.Stream(self._device), cuda.Stream(self._device))
        buffer_bytes = self._options.buffer_bytes if self._device.type == "cuda" else self._options.buffer_bytes // 8
        self._buffer_blocks = max(1, buffer_bytes // self.block_bytes)
        for _ in range(self._options.num_save_buffers):
            self._save_buffers.put(self._new_buffer())
        for _ in range(self._options.num_load_buffers):
            self._load_buffers.put(self._new_buffer())

    # Saving

    def save(self, jobs: Sequence[SaveJob], frees: Sequence[str]) -> None:
        """Read blocks from KV memory; a thread puts them to the pool. A rank whose part another saves does nothing."""
        if not self._saves:
            return
        if jobs:
            began_s = time.perf_counter()
            blocks = [block for job in jobs for block in job.blocks]
            owners = [(job.request, key) for job in jobs for key in keys_of_part(job.keys, self._part)]
            for start in range(0, len(blocks), self._buffer_blocks):
                part = slice(start, start + self._buffer_blocks)
                self._save_part(blocks[part], owners[part])
            self._seconds["save_s"] += time.perf_counter() - began_s
        if frees:
            self._saver.submit(self._free, list(frees))

    def _save_part(self, blocks: list[int], owners: list[tuple[str, bytes]]) -> None:
        try:
            buffer = self._save_buffers.get(timeout=self._options.save_wait_s)
        except queue.Empty:
            self._counts["dropped_blocks"] += len(blocks)
            if self._part == 0:  # vLLM adds the ranks' counts, and a block is one block to all of them
                with self._lock:
                    self._stats[UNSAVED_BLOCKS] += len(blocks)
            return
        host = buffer.host[: len(blocks)]
        index = torch.tensor(blocks, dtype=torch.int64)
        if self._streams is None:
            self._gather(index, host)
        else:
            index = index.pin_memory().to(self._device, non_blocking=True)
            gathered = torch.cat([layer.index_select(0, index) for layer in self._layers], dim=1)
            copying = self._streams[0]
            copying.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(copying):
                host.copy_(gathered, non_blocking=True)
                buffer.ready = copying.record_event()
            gathered.record_stream(copying)
        self._saver.submit(self._put, buffer, owners)

    def _gather(self, index: torch.Tensor, host: torch.Tensor) -> None:
        start = 0
        for layer in self._layers:
            end = start + layer.shape[1]
            host[:, start:end] = layer.index_select(0, index)
            start = end

    def _put(self, buffer: _HostBuffer, owners: Sequence[tuple[str, bytes]]) -> None:
        """In the saver's thread: put a buffer's blocks to the pool with all writers.

        One call per request would hold the interpreter lock for as long as several steps take to schedule.
        """
        try:
            if buffer.ready is not None:
                buffer.ready.synchronize()
            rows = buffer.host.numpy()
            requests, keys = zip(*owners, strict=True)
            spans = self._spans(len(keys), self._options.save_threads)
            puts = [self._writers.submit(self._pool.put_now, keys[one], rows[one], requests[one]) for one in spans]
            wait(puts)  # the buffer is free only when the last of them is done
            held = [is_held for put in puts for is_held in put.result()]
            self._counts["saved_blocks"] += sum(held)
            self._counts["refused_blocks"] += len(held) - sum(held)
        except Exception:  # the edge: a pool that fails must not end the engine
            self._counts["save_errors"] += 1
        finally:
            self._save_buffers.put(buffer)

    def _free(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._pool.free(request)

    def settle(self) -> None:
        """Wait for the saver."""
        self._saver.submit(lambda: None).result()

    # Loading

    def load(self, jobs: Sequence[LoadJob]) -> None:
        """Fill blocks from the pool; asynchronous jobs are filled in a thread."""
        now = [job for job in jobs if not job.is_async]
        later = [job for job in jobs if job.is_async]
        if now:
            began_s = time.perf_counter()
            self._fill(now)
            self._note_load(now, LOAD_S, time.perf_counter() - began_s)
        if later:
            launched = None
            if self._streams is not None:
                # Steps already launched may still write to these blocks for their previous owners.
                launched = torch.cuda.current_stream(self._device).record_event()
            self._loader.submit(self._fill_in_background, later, launched)

    def _fill_in_background(self, jobs: Sequence[LoadJob], launched: Any) -> None:
        began_s = time.perf_counter()
        try:
            with contextlib.ExitStack() as on_stream:
                if self._streams is not None:
                    torch.cuda.set_device(self._device)
                    self._streams[1].wait_event(launched)
                    on_stream.enter_context(torch.cuda.stream(self._streams[1]))
                self._fill(jobs)
                if self._streams is not None:
                    self._streams[1].synchronize()
        except Exception:  # the edge: what cannot be loaded is computed
            with self._lock:
                self._failed.update(block for job in jobs for block in job.blocks)
        self._note_load(jobs, OVERLAPPED_LOAD_S, time.perf_counter() - began_s)
        with self._lock:
            self._loaded.update(job.request_id for job in jobs)

    def _note_load(self, jobs: Sequence[LoadJob], kind: str, seconds: float) -> None:
        far = take_far_reads(self._pool)
        with self._lock:
            if far.num_bytes:
                self._stats[FAR_BYTES] += far.num_bytes
                self._stats[FAR_S] += min(far.seconds, seconds) / self._num_ranks  # readers overlap
            self._seconds["load_s"] += seconds
            self._stats[kind] += seconds / self._num_ranks  # vLLM adds the ranks' counts, which load at the same time
            self._stats[LOADED_BYTES] += self.block_bytes * sum(len(job.blocks) for job in jobs)

    def _fill(self, jobs: Sequence[LoadJob]) -> None:
        blocks = [block for job in jobs for block in job.blocks]
        keys = [key for job in jobs for key in keys_of_part(job.keys, self._part)]
        reading: deque[tuple[list[int], _HostBuffer, list[Future[list[bool]]]]] = deque()
        try:
            for start in range(0, len(blocks), self._buffer_blocks):
                part = slice(start, start + self._buffer_blocks)
                if reading and self._load_buffers.empty():
                    self._scatter(*reading.popleft())
                # Here and in order: readers that waited for buffers could block each other.
                buffer, reads = self._load_buffers.get(), list[Future[list[bool]]]()
                reading.append((blocks[part], buffer, reads))
                reads += self._read_all(buffer, keys[part])
            while reading:
                self._scatter(*reading.popleft())
        finally:
            for _, buffer, reads in reading:  # after an error
                wait(reads)  # they fill the buffer
                self._load_buffers.put(buffer)

    def _read_all(self, buffer: _HostBuffer, keys: list[bytes]) -> list[Future[list[bool]]]:
        """Fill a buffer from the pool with all reader threads."""
        if buffer.ready is not None:
            buffer.ready.synchronize()
            buffer.ready = None
        rows = buffer.host.numpy()
        spans = self._spans(len(keys), self._options.load_threads)
        return [self._readers.submit(self._read, keys[one], rows[one]) for one in spans]

    @staticmethod
    def _spans(num_keys: int, num_threads: int) -> list[slice]:
        """Equal parts, one for each thread."""
        size = -(-num_keys // num_threads)
        return [slice(start, min(start + size, num_keys)) for start in range(0, num_keys, size)]

    def _read(self, keys: list[bytes], rows: Any) -> list[bool]:
        """In a reader's thread."""
        try:
            return self._pool.get_now(keys, rows[: len(keys)])
        except Exception:  # the edge: a pool that fails counts as a miss
            return [False] * len(keys)

    def _scatter(self, blocks: list[int], buffer: _HostBuffer, reads: Sequence[Future[list[bool]]]) -> None:
        """Write a buffer's blocks to the KV memory, and give the buffer back."""
        try:
            self._write(blocks, buffer, reads)
        finally:
            self._load_buffers.put(buffer)

    def _write(self, blocks: list[int], buffer: _HostBuffer, reads: Sequence[Future[list[bool]]]) -> None:
        found = [hit for read in reads for hit in read.result()]
        self._counts["loaded_blocks"] += sum(found)
        if not all(found):
            self._counts["missed_blocks"] += len(found) - sum(found)
            with self._lock:
                self._failed.update(block for block, hit in zip(blocks, found, strict=True) if not hit)
        # Missed blocks get arbitrary bytes; they are computed before they are read.
        index = torch.tensor(blocks, dtype=torch.int64)
        rows = buffer.host[: len(blocks)]
        if self._streams is not None:
            index = index.pin_memory().to(self._device, non_blocking=True)
            rows = rows.to(self._device, non_blocking=True)
            buffer.ready = torch.cuda.current_stream(self._device).record_event()
        start = 0
        for layer in self._layers:
            end = start + layer.shape[1]
            layer.index_copy_(0, index, rows[:, start:end])
            start = end

    # Called by vLLM through the connector

    def take_loaded(self) -> set[str]:
        """Requests whose asynchronous loads are complete."""
        if not self._loaded:
            return set()
        with self._lock:
            loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed(self) -> set[int]:
        """Blocks that could not be loaded."""
        if not self._failed:
            return set()
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def take_stats(self) -> dict[str, float]:
        """What was loaded since the last call and how long it took, and what was not saved (`connector_stats.py`)."""
        if not self._stats:
            return {}
        with self._lock:
            stats, self._stats = self._stats, defaultdict(float)
        return dict(stats)

    def counts(self) -> dict[str, float]:
        """Blocks moved, missed and dropped; seconds the worker spent on it."""
        return {**self._counts, **self._seconds}

    def close(self) -> None:
        """Finish the saves that were read, and cancel loads that have not begun."""
        self._loader.shutdown(wait=True, cancel_futures=True)
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._saver.shutdown(wait=True)
        self._writers.shutdown(wait=True)

    def _new_buffer(self) -> _HostBuffer:
        shape = (self._buffer_blocks, self.block_bytes)
        return _HostBuffer(torch.empty(shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda"))


def _block_bytes_view(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A view of a layer's KV memory as [block, byte], for any order of heads and tokens inside a block.

    A block of the scheduler may be several consecutive blocks of the attention kernel.
    """
    inner = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True))
    dense = 1
    for stride, size in inner:
        if size > 1 and stride != dense:
            raise ConfigError(
                f"KV memory of shape {list(cache.shape)} and strides {list(cache.stride())} is not blocked"
            )
        dense *= size
    pieces, rest = divmod(cache.shape[0], num_blocks)
    if rest or not pieces or (pieces > 1 and cache.stride(0) != dense):
        raise ConfigError(f"KV memory of shape {list(cache.shape)} does not hold {num_blocks} blocks, blocks first")
    flat = torch.as_strided(cache, (num_blocks, pieces * dense), (pieces * cache.stride(0), 1))
    return flat.view(torch.uint8)
