# SPDX-License-Identifier: Apache-2.0
"""Load on draft servers: two clients and one server, or several shards, on loopback. Rate, lag, memory, cores.

Each client observes half of the offered tokens, in steps of 10 ms over its running requests, and drafts for
all of them after each step. Lag is the time from `observe` in one process until the other's index holds the
token, on the system's monotonic clock. It is found by polling a few streams every 2 ms; polling adds to it.

    python benchmarks/drafting/server_load.py [--seconds 60] [--rate 200000] [--shards 8] [--kill]
"""

import argparse
import json
import multiprocessing as mp
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.drafting.client import ClientConfig, DraftClient
from seer.drafting.curve_keys import ClientKeys, ServerKeys, make_keys
from seer.drafting.wire import Ask, Status, decode, encode
from stamp import take_stamp

STEP_S = 0.01
GROUPS = 32
REQUESTS = 128  # running per client, four of each group
WATCHED = 8
FIRST_PORT = 15757


def address(shard: int) -> str:
    return f"tcp://127.0.0.1:{FIRST_PORT + shard}"


@dataclass(frozen=True)
class Load:
    """What both clients offer together."""

    seconds: float
    rate: float
    keys: ClientKeys
    shards: int


def drive(me: int, load: Load, begin: float, out: Connection) -> None:
    """One client: observes, drafts, and watches streams of the other."""
    seconds = load.seconds
    servers = tuple(map(address, range(load.shards)))
    client = DraftClient(ClientConfig(servers=servers, keys=load.keys))
    rng = np.random.default_rng(me)
    keys = [(item % GROUPS, 1000 * me + item) for item in range(REQUESTS)]
    other = [(item % GROUPS, 1000 * (1 - me) + item) for item in range(0, REQUESTS, REQUESTS // WATCHED)]
    for group in range(GROUPS):
        client.register(group, ttl_s=600.0)
    # Responses of a group repeat pieces of one text.
    books = [rng.integers(0, 50_000, 20_000).astype(np.int32) for _ in range(GROUPS)]
    noted: list[tuple[float, int]] = []  # when, length each own request has reached
    seen: list[tuple[float, list[int]]] = []
    stopping = threading.Event()

    def watch() -> None:
        while not stopping.wait(0.002):
            seen.append((time.monotonic(), [client.index.length(*stream) for stream in other]))

    watcher = threading.Thread(target=watch)
    watcher.start()
    per_step = load.rate * STEP_S / 2 / REQUESTS
    length, carry, step, steps_s = 0, 0.0, 0, []
    while time.monotonic() < begin:
        time.sleep(0.001)
    while time.monotonic() < begin + seconds:
        carry += per_step
        count, carry = int(carry), carry - int(carry)
        pieces = [books[group][(length + 37 * item) % 19_000 :][:count] for item, (group, _) in enumerate(keys)]
        start = time.monotonic()
        client.observe_batch(keys, np.concatenate(pieces), np.arange(REQUESTS + 1, dtype=np.int64) * count)
        length += count
        noted.append((start, length))
        client.draft(keys, np.full(REQUESTS, 8, np.int32))
        steps_s.append(time.monotonic() - start)
        step += 1
        time.sleep(max(begin + step * STEP_S - time.monotonic(), 0))
    flushed = client.flush(10.0)
    stopping.set()
    watcher.join()
    client.close()
    tokens, cpu_s = length * REQUESTS, time.process_time()
    out.send({"noted": noted, "seen": seen, "steps_s": steps_s, "flushed": flushed, "tokens": tokens, "cpu_s": cpu_s})


def lags(noted: list[tuple[float, int]], seen: list[tuple[float, list[int]]]) -> np.ndarray:
    """For each step of one client and each watched stream: when did the other hold all of it?"""
    times = np.array([when for when, _ in seen])
    lengths = np.array([row for _, row in seen])
    result = []
    for stream in range(lengths.shape[1]):
        reached = np.searchsorted(lengths[:, stream], [length for _, length in noted])
        inside = reached < len(times)
        starts = np.array([when for when, _ in noted])
        result.append(times[reached[inside]] - starts[inside])
    return np.concatenate(result)


SERVE = """
import sys
from seer.drafting.curve_keys import ServerKeys
from seer.drafting.server import DraftServer, ServerConfig, bound_memory

address, *keys = sys.argv[1:]
config = ServerConfig(address=address, keys=ServerKeys(secret_key=keys[0], client_public_key=keys[1]))
bound_memory(config.limits)
server = DraftServer(config)
print(server.address, flush=True)
server.run()
"""


def start_server(keys: ServerKeys, shard: int) -> subprocess.Popen[str]:
    """One process, as a fleet starts it."""
    command = [sys.executable, "-c", SERVE, address(shard), keys.secret_key, keys.client_public_key]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None, "a pipe was asked for"
    assert server.stdout.readline(), "the server did not start"
    return server


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise ValueError("no resident size")


def cpu_s(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status(keys: ClientKeys, shard: int) -> Status:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        keys.secure(socket)
        socket.connect(address(shard))
        socket.send(encode(Ask(1)))
        assert socket.poll(5000), "the server does not answer"
        reply = decode(socket.recv())
        assert isinstance(reply, Status), f"got {reply}"
        return reply


def measure(seconds: float, rate: float, *, kill: bool, shards: int = 1) -> dict[str, Any]:
    """Run the load with new keys."""
    server_keys, client_keys = make_keys()
    return run(Load(seconds, rate, client_keys, shards), server_keys, kill)


def run(load: Load, server_keys: ServerKeys, kill: bool) -> dict[str, Any]:
    seconds = load.seconds
    servers = [start_server(server_keys, shard) for shard in range(load.shards)]
    empty = sum(resident_bytes(server.pid) for server in servers)
    started_cpu_s = sum(cpu_s(server.pid) for server in servers)
    begin = time.monotonic() + 1.5
    context = mp.get_context("spawn")
    pipes, clients = [], []
    for me in (0, 1):
        here, there = context.Pipe(duplex=False)
        clients.append(context.Process(target=drive, args=(me, load, begin, there)))
        clients[-1].start()
        pipes.append(here)
    try:
        if kill:
            time.sleep(max(begin + seconds / 2 - time.monotonic(), 0))
            servers[0].kill()
            servers[0].wait()
            servers[0] = start_server(server_keys, 0)
        results = []
        for pipe in pipes:
            assert pipe.poll(seconds + 60), "a client hangs"
            results.append(pipe.recv())
        held_tokens = sum(status(load.keys, shard).tokens for shard in range(load.shards))
        memory = sum(resident_bytes(server.pid) for server in servers) - empty
        servers_cpu_s = sum(cpu_s(server.pid) for server in servers) - started_cpu_s
    finally:
        for server in servers:
            server.kill()
        for client in clients:
            client.join(10)
            client.kill()
    lag = np.concatenate([lags(results[0]["noted"], results[1]["seen"]), lags(results[1]["noted"], results[0]["seen"])])
    steps = np.concatenate([result["steps_s"] for result in results])
    tokens = sum(result["tokens"] for result in results)
    return {
        "tokens_per_s": tokens / seconds,
        "tokens": tokens,
        "tokens_on_server": held_tokens,
        "all_shipped": all(result["flushed"] for result in results),
        "lag_p50_ms": float(np.percentile(lag, 50)) * 1e3,
        "lag_p99_ms": float(np.percentile(lag, 99)) * 1e3,
        "lag_max_ms": float(lag.max()) * 1e3,
        "step_p50_ms": float(np.percentile(steps, 50)) * 1e3,
        "step_p99_ms": float(np.percentile(steps, 99)) * 1e3,
        "server_bytes_per_token": memory / held_tokens,
        "server_tokens_per_core_s": tokens / servers_cpu_s,
        "client_tokens_per_core_s": tokens / sum(result["cpu_s"] for result in results),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=200_000.0)
    parser.add_argument("--shards", type=int, default=1, help="servers that share the groups")
    parser.add_argument("--kill", action="store_true", help="kill and restart the first server half-way")
    args = parser.parse_args()
    found = measure(args.seconds, args.rate, kill=args.kill, shards=args.shards)
    print(json.dumps({"stamp": take_stamp(args)} | found, indent=2))
