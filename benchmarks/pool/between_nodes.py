# SPDX-License-Identifier: Apache-2.0
"""KV of one request: moved inside a node, moved between nodes over Mooncake's TCP, or computed again.

    python benchmarks/pool/between_nodes.py [--tokens 1024,8192,32768] [--repeats 3]

Blocks have the shape of Qwen2.5-7B in bfloat16: 28 layers, 4 KV heads of 128, 16 tokens, 896 KiB. A Mooncake master and
an owner run on loopback; the writer uses the owner through shared memory, as an instance on its node. The reader has no
owner and reads over TCP, as an instance elsewhere; `near` reads from a local pool. Beside them, a plain TCP stream over
the same loopback. Computing is not measured: it is what the simulator's cost model charges for an 8B model on one H200.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.kvpool.base import Pool
from seer.kvpool.keys import KVLayout, Namespace, block_keys
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig
from seer.kvpool.mooncake import MooncakePool, MooncakePoolConfig
from seer.kvpool.mooncake_servers import MooncakeServers, MooncakeServersConfig
from seer.sim.costs import H200, MODELS, InstanceCost
from stamp import take_stamp

LAYOUT = KVLayout(num_layers=28, num_kv_heads=4, head_dim=128, dtype="bfloat16", block_size=16)
BLOCK_BYTES = 2 * LAYOUT.num_layers * LAYOUT.num_kv_heads * LAYOUT.head_dim * 2 * LAYOUT.block_size
BATCH = 16
"""Blocks of one call, as an engine with the default staging memory reads them."""
PIECE_BYTES = 1 << 20


def moved_s(pool: Pool, keys: np.ndarray, blocks: np.ndarray, *, put: bool) -> float:
    """Seconds to put, or to get, all blocks; they must all come."""
    began_s = time.perf_counter()
    for start in range(0, len(keys), BATCH):
        part = keys[start : start + BATCH]
        rows = blocks[: len(part)]
        done = pool.put_now(part, rows) if put else pool.get_now(part, rows)
        assert all(done), f"{len(done) - sum(done)} blocks did not come"
    return time.perf_counter() - began_s


def loopback_bytes_s(num_bytes: int = 2 << 30) -> float:
    """A plain stream between two threads."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = socket.create_connection(listening.getsockname())
        receiver, _ = listening.accept()

        def send() -> None:
            piece = bytes(PIECE_BYTES)
            for _ in range(num_bytes // PIECE_BYTES):
                sender.sendall(piece)
            sender.close()

        thread = threading.Thread(target=send)
        began_s, buffer, got = time.perf_counter(), bytearray(PIECE_BYTES), 0
        thread.start()
        while num := receiver.recv_into(buffer):
            got += num
        thread.join()
        receiver.close()
        return got / (time.perf_counter() - began_s)


def keys_of(num_tokens: int, salt: int) -> np.ndarray:
    namespace = Namespace(model="m", weights_version=1, layout=LAYOUT)
    return block_keys(namespace, np.arange(num_tokens) + salt * 1_000_000)


def measure(num_tokens: int, repeats: int, servers: MooncakeServers, near_dir: Path) -> dict[str, Any]:
    num_bytes = num_tokens // LAYOUT.block_size * BLOCK_BYTES
    blocks = np.random.default_rng(0).integers(0, 256, (BATCH, BLOCK_BYTES), dtype=np.uint8)
    times: dict[str, list[float]] = {"put": [], "between": [], "near": []}
    with contextlib.ExitStack() as stack:
        deadline = {"block_bytes": BLOCK_BYTES, "deadline_s": 60.0}
        writer = MooncakePool(MooncakePoolConfig(owner_address=servers.owner_address, **deadline))  # type: ignore[arg-type]
        reader = MooncakePool(MooncakePoolConfig(master_address=servers.master_address, **deadline))  # type: ignore[arg-type]
        config = LocalPoolConfig(
            block_bytes=BLOCK_BYTES,
            dram_bytes=num_bytes + 64 * BLOCK_BYTES,
            name=uuid.uuid4().hex,
            dram_dir=str(near_dir),
        )
        near = LocalPool(config)
        stack.callback(near.close, remove=True)
        stack.callback(writer.close)
        stack.callback(reader.close)
        warm = keys_of(LAYOUT.block_size, 99)  # the first read opens connections
        assert writer.put_now(warm, blocks[:1]) == reader.get_now(warm, blocks[:1]) == [True]
        for repeat in range(repeats):
            keys = keys_of(num_tokens, repeat)
            times["put"].append(moved_s(writer, keys, blocks, put=True))
            times["between"].append(moved_s(reader, keys, blocks, put=False))
            moved_s(near, keys, blocks, put=True)
            times["near"].append(moved_s(near, keys, blocks, put=False))
            near.drop_weights_version(1)
            near.close(remove=True)
            near = LocalPool(config)
            stack.callback(near.close, remove=True)
            writer.remove_all()
    prefill = InstanceCost(model=MODELS["llama-8b"], gpu=H200, num_gpus=1).transfer_costs().prefill
    found = {name: sorted(some)[len(some) // 2] for name, some in times.items()}
    return {"tokens": num_tokens, "bytes": num_bytes, **found, "computed": prefill.seconds(0, num_tokens)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,8192,32768")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    sizes = [int(size) for size in args.tokens.split(",")]
    largest = max(sizes) // LAYOUT.block_size * BLOCK_BYTES
    loopback = loopback_bytes_s()
    rows = []
    with MooncakeServers(MooncakeServersConfig(dram_bytes=int(1.5 * largest) + (256 << 20))) as servers:
        for size in sizes:
            rows.append(measure(size, args.repeats, servers, Path("/dev/shm")))
            print(rows[-1], flush=True)
    print(json.dumps({"stamp": take_stamp(args), "loopback_bytes_s": loopback, "rows": rows}, indent=1))
    print(f"\nplain TCP over loopback: {loopback / 1e9:.1f} GB/s\n")
    print("| tokens | KV | inside a node | between nodes | saved | computed again (model of an H200) |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = (
            f"{1e3 * row[name]:,.0f} ms, {row['bytes'] / row[name] / 1e9:.1f} GB/s"
            for name in ("near", "between", "put")
        )
        computed = f"{1e3 * row['computed']:,.0f} ms"
        print(f"| {row['tokens']:,} | {row['bytes'] / 1e6:,.0f} MB | {' | '.join(cells)} | {computed} |")


if __name__ == "__main__":
    main()
