# SPDX-License-Identifier: Apache-2.0
"""LMCache's local CPU backend, measured as `seer bench pool` measures ours. run.py starts it in its own environment.

    VENV/bin/python benchmarks/pool/lmcache_peer.py BLOCK_BYTES ROUND_BYTES ROUNDS

It is one process, because the backend cannot be shared. A put does what LMCache's engine does without a GPU: allocate,
copy, submit. A get fetches, copies out and releases. torch chooses the number of threads of a copy.
"""

import json
import logging
import statistics
import sys
import time

logging.disable(logging.CRITICAL)

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend


def main(block_bytes: int, round_bytes: int, rounds: int) -> None:
    num_blocks = round_bytes // block_bytes
    config = LMCacheEngineConfig.from_defaults(local_cpu=True)
    backend = LocalCPUBackend(config, memory_allocator=HostMemoryAllocator(2 * round_bytes))
    shape, dtype = torch.Size([2, 1, 1, block_bytes // 4]), torch.bfloat16
    source = torch.randint(0, 100, (num_blocks, *shape), dtype=torch.int16).view(dtype)
    target, scratch = torch.ones_like(source), torch.ones_like(source)
    rates = {}

    def in_turns(what, number, keys, move) -> None:
        moves, copies = [], []
        for i in range(num_blocks):
            far = (i + num_blocks // 2) % num_blocks  # not the block just read
            start = time.perf_counter()
            move(i, keys[i])
            middle = time.perf_counter()
            scratch[far].copy_(source[far])
            copies.append(time.perf_counter() - middle)
            moves.append(middle - start)
        move_s, copy_s = statistics.median(moves) * num_blocks, statistics.median(copies) * num_blocks
        if number:
            rates.setdefault(f"{what}_bytes_s", []).append(round_bytes / move_s)
            rates.setdefault("memcpy_bytes_s", []).append(round_bytes / copy_s)
            rates.setdefault(f"{what}_to_memcpy", []).append(copy_s / move_s)

    def put(i, key) -> None:
        block = backend.allocate(shape, dtype)
        block.tensor.copy_(source[i])
        backend.submit_put_task(key, block)
        block.ref_count_down()

    def get(i, key) -> None:
        block = backend.get_blocking(key)
        target[i].copy_(block.tensor)
        block.ref_count_down()

    for number in range(rounds + 1):
        keys = [CacheEngineKey("m", 1, 0, number * num_blocks + i, dtype) for i in range(num_blocks)]
        in_turns("put", number, keys, put)
        target.zero_()
        in_turns("get", number, keys, get)
        assert torch.equal(target.view(torch.int16), source.view(torch.int16))
        start = time.perf_counter()
        held = sum(backend.contains(keys[i % num_blocks]) for i in range(256))
        lookup_s = time.perf_counter() - start
        assert held == 256
        for key in keys:
            backend.remove(key)
    spread = lambda v: {"median": statistics.median(v), "least": min(v), "most": max(v)}  # noqa: E731
    result = {
        "backend": "lmcache LocalCPU (1 process)",
        "threads": torch.get_num_threads(),
        **{name: spread(values) for name, values in rates.items()},
        "lookup_s": lookup_s,
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
