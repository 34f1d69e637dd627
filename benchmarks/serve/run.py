# SPDX-License-Identifier: Apache-2.0
"""Load on a server: streams at once for a time, or requests at a rate; `seer serve`, or another server by its URL.

    python benchmarks/serve/run.py streams --streams 2000 --duration-s 300
    python benchmarks/serve/run.py rate --rate 1000 --duration-s 30
    python benchmarks/serve/run.py streams --model tiny --streams 64 --url http://127.0.0.1:9000 --pid 1234

`streams` keeps so many streamed completions open: each that ends is followed by another. It checks that every one ends
with [DONE] and its last token, and samples the memory of the server. `rate` sends whole completions of one token at
fixed times, whether or not earlier ones were answered, and measures each from the time it was due: what HTTP, the
session and the hop to an instance add.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stamp import print_stamp

MAX_TOKENS = 64
END = b"data: [DONE]\n\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
TOKENS = re.compile(rb'"token_ids":\[([^\]]*)\]')


@dataclass
class Tally:
    """What the clients saw."""

    latencies_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_lost: int = 0
    num_refused: int = 0
    memory_mib: list[float] = field(default_factory=list)


def body_of(options: argparse.Namespace, number: int, *, stream: bool) -> bytes:
    max_tokens = options.max_tokens if stream else 1
    value: dict[str, Any] = {"prompt": [3 + number % 100, 7, 11], "max_tokens": max_tokens, "seed": number}
    value |= {"stream": stream, "ignore_eos": True, "return_token_ids": True}
    if options.logprobs:
        value["logprobs"] = 1
    if options.name:
        value["model"] = options.name
    return json.dumps(value).encode()


class Connection(asyncio.Protocol):
    """One keep-alive connection that speaks just enough HTTP: the load must cost less than what it measures."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._transport: Any = None
        self._received = bytearray()
        self._answer: asyncio.Future[bytes] | None = None

    async def post(self, body: bytes) -> tuple[int, bytes]:
        """Status, and the body with the marks of its chunks."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            await loop.create_connection(lambda: self, self._host, self._port)
        self._received.clear()
        self._answer = loop.create_future()
        self._transport.write(b"%sContent-Length: %d\r\n\r\n%s" % (HEAD, len(body), body))
        answer = await self._answer
        return int(answer[9:12]), answer[answer.index(b"\r\n\r\n") + 4 :]

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._answer is not None and not self._answer.done() and self._is_whole():
            self._answer.set_result(bytes(self._received))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("closed before the answer ended"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _is_whole(self) -> bool:
        if self._received.endswith(b"0\r\n\r\n"):
            return True
        end = self._received.find(b"\r\n\r\n")
        found = LENGTH.search(self._received, 0, end) if end >= 0 else None
        return found is not None and len(self._received) >= end + 4 + int(found.group(1))


async def one_stream(connection: Connection, options: argparse.Namespace, number: int, tally: Tally) -> None:
    began_s = time.monotonic()
    try:
        status, text = await connection.post(body_of(options, number, stream=True))
    except OSError:
        tally.num_lost += 1
        return
    if status in (429, 503):
        tally.num_refused += 1
        await asyncio.sleep(0.1)
        return
    num_tokens = sum(ids.count(b",") + 1 for ids in TOKENS.findall(text) if ids)
    tally.num_lost += status != 200 or END not in text[-40:] or num_tokens != options.max_tokens
    tally.num_tokens += num_tokens
    tally.latencies_s.append(time.monotonic() - began_s)


async def run_streams(host: str, port: int, options: argparse.Namespace, tally: Tally) -> float:
    began_s = time.monotonic()
    number = 0

    async def client() -> None:
        nonlocal number
        connection = Connection(host, port)
        while time.monotonic() - began_s < options.duration_s:
            number += 1
            await one_stream(connection, options, number, tally)
        connection.close()

    async def sample() -> None:
        while True:
            tally.memory_mib.append(memory_mib(options.pid))
            await asyncio.sleep(max(0.5, options.duration_s / 100))

    sampling = asyncio.create_task(sample())
    await asyncio.gather(*(client() for _ in range(options.streams)))
    sampling.cancel()
    return time.monotonic() - began_s


async def run_rate(host: str, port: int, options: argparse.Namespace, tally: Tally) -> float:
    idle = [Connection(host, port) for _ in range(options.connections)]
    began_s = time.monotonic()

    async def one(number: int, due_s: float) -> None:
        connection = idle.pop() if idle else Connection(host, port)
        try:
            status, _ = await connection.post(body_of(options, number, stream=False))
        except OSError:
            tally.num_lost += 1
            return
        idle.append(connection)
        tally.num_lost += status != 200
        tally.num_tokens += 1
        tally.latencies_s.append(time.monotonic() - due_s)

    sent = []
    for number in range(round(options.rate * options.duration_s)):
        due_s = began_s + number / options.rate
        if (wait_s := due_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        sent.append(asyncio.create_task(one(number, due_s)))
    await asyncio.gather(*sent)
    return time.monotonic() - began_s


def memory_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def a_server(options: argparse.Namespace) -> Iterator[str]:
    """The server to measure: started here, or given by its URL."""
    if options.url is not None:
        yield options.url
        return
    with tempfile.TemporaryDirectory() as home:
        if options.model == "fake":
            words = [
                "--engine",
                "fake",
                "--model",
                "none",
                "--max-num-seqs",
                "4096",
                "--set",
                "rollout.kv.blocks=65536",
            ]
            words += ["--set", f"rollout.engine_settings.step_s={options.step_s}"]
        else:
            from seer.engine.local.tiny import make_tiny_model

            words = ["--model", str(make_tiny_model(Path(home) / "tiny", head_dim=32))]
        command = [sys.executable, "-m", "seer.cli.main", "serve", "--port", "0", "--json", "--max-in-flight", "8192"]
        process = subprocess.Popen(
            [*command, "--instances", str(options.instances), *words], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            options.pid = process.pid
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("streams", "rate"))
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--duration-s", type=float, default=30.0)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--model", choices=("fake", "tiny"), default="fake")
    parser.add_argument("--step-s", type=float, default=0.001)
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--logprobs", action="store_true", help="ask for log-probabilities, as RL does")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--name", help="its name of the model")
    parser.add_argument("--pid", type=int, help="its process")
    args = parser.parse_args()
    print_stamp(args)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with a_server(args) as url:
        host, port = url.removeprefix("http://").split(":")
        tally, before_s = Tally(), cpu_s(args.pid)
        work = run_streams if args.what == "streams" else run_rate
        took_s = run_fast(work(host, int(port), args, tally))
        print(json.dumps(summary(tally, took_s, cpu_s(args.pid) - before_s)))


def run_fast(work: Coroutine[Any, Any, float]) -> float:
    """On uvloop, where there is one."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def summary(tally: Tally, took_s: float, server_s: float) -> dict[str, Any]:
    ordered = sorted(tally.latencies_s)
    memory = tally.memory_mib
    fifths = [memory[min(len(memory) - 1, len(memory) * i // 5)] for i in range(1, 6)] if memory else None
    return {
        "requests": len(ordered),
        "lost": tally.num_lost,
        "refused": tally.num_refused,
        "requests_s": len(ordered) / took_s,
        "tokens_s": tally.num_tokens / took_s,
        "p50_ms": 1000 * ordered[len(ordered) // 2],
        "p99_ms": 1000 * ordered[int(len(ordered) * 0.99)],
        "server_cpu_us_per_token": 1e6 * server_s / max(1, tally.num_tokens),
        "server_cpu_share": server_s / took_s,
        "client_cpu_share": time.process_time() / took_s,
        "memory_mib_at_each_fifth": fifths,
    }


if __name__ == "__main__":
    main()
