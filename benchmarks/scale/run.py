# SPDX-License-Identifier: Apache-2.0
"""What a driver carries: the rollout loop over many connections with the real messages; the instances are paced fakes.

    python benchmarks/scale/run.py [--instances 1024] [--requests 130000] [--seconds 20] [--tick 2.0] [--tokens 8]

Two processes on one machine: this one is the driver, farm.py holds all instances. Every instance has its own TCP
connection with the handshake of a remote fleet, encrypted with --encrypted. Requests are admitted at once, as many as
fit run at the same time, and those that end make room for others. Prints the driver's share of a core per 1,000
tokens/s, its memory per request, and the time from a decision to its chunk's first byte on the socket (`sent`) and to
the arrival at the instance (`wait`), which also waits for the farm's turn on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.config import HostingConfig
from seer.context import Context
from seer.engine.prepare import InstanceSpec
from seer.hosting import ProcessInstance
from seer.hosting.launcher import DialLauncher
from seer.hosting.remote.dial import Dial
from seer.hosting.remote.listener import Listener
from seer.machine.collector import collected_seldom
from seer.machine.descriptors import allow_descriptors
from seer.metrics.events import Event, Started
from seer.rollout import RolloutLoop
from seer.runs.run import GATHER_S
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.types import Group, Sampling
from stamp import take_stamp

GROUP_SIZE = 16
SLOTS = 98
"""Of an instance (farm.py)."""
PROMPT_TOKENS = 512
START_DEADLINE_S = 120.0
OPTIONS = HostingConfig(
    heartbeat_s=1.0, silence_deadline_s=300.0, progress_deadline_s=600.0, start_deadline_s=START_DEADLINE_S
)


def say(what: str) -> None:
    sys.stderr.write(f"{what}\n")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TimedInstance(ProcessInstance):
    """Notes when chunks are on the socket."""

    sent_s: ClassVar[dict[tuple[int, int], float]] = {}

    def _send_chunks(self) -> None:
        chunks = list(self._unsent)
        super()._send_chunks()
        now_s = time.monotonic()
        self.sent_s.update(((chunk.request, chunk.attempt), now_s) for chunk in chunks)


class Counts:
    """What the driver saw."""

    def __init__(self, num_fitting: int) -> None:
        self._num_fitting = num_fitting
        self.decided: dict[tuple[int, int], float] = {}
        self.attempts: dict[int, int] = {}
        self.num_tokens = self.num_outputs = self.num_events = 0
        self.filled = asyncio.Event()
        """Set when as many requests as fit have been started."""

    def __call__(self, event: Event) -> None:
        self.num_events += 1
        if isinstance(event, Started):
            attempt = self.attempts[event.request] = self.attempts.get(event.request, 0) + 1
            self.decided[event.request, attempt] = event.t_s
            if len(self.decided) >= self._num_fitting:
                self.filled.set()


async def start_farm(args: argparse.Namespace, out: Path) -> asyncio.subprocess.Process:
    farm = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).parent / "farm.py"), stdin=asyncio.subprocess.PIPE
    )
    assert farm.stdin is not None
    settings = {"tick_s": args.tick, "tokens": args.tokens, "instances": args.instances, "out": str(out)}
    farm.stdin.write(json.dumps(settings).encode() + b"\n")
    return farm


async def connect(args: argparse.Namespace, farm: asyncio.subprocess.Process, counts: Counts) -> list[ProcessInstance]:
    listener = Listener("127.0.0.1", encrypted=args.encrypted)
    await listener.start()

    async def hand_over(id: int, dial: Dial) -> None:
        assert farm.stdin is not None
        plain = {name: getattr(dial, name) for name in dial.__slots__} | {"secret": dial.secret.hex()}
        farm.stdin.write(json.dumps(plain).encode() + b"\n")
        await farm.stdin.drain()

    launcher = DialLauncher(listener, hand_over)
    spec = InstanceSpec(factory="", settings={})
    return [TimedInstance(i, spec, options=OPTIONS, launcher=launcher, events=counts) for i in range(args.instances)]


async def measure(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    counts = Counts(min(args.requests, args.instances * SLOTS))
    farm = await start_farm(args, out)
    instances = await connect(args, farm, counts)
    outputs: list[Any] = []
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    for first in range(0, len(instances), 64):
        await asyncio.gather(*(one.start(outputs.append) for one in instances[first : first + 64]))
    connected = {"connect_s": time.monotonic() - began_s, "connect_cpu_s": time.process_time() - began_cpu_s}
    say(f"{args.instances} connections in {connected['connect_s']:.1f} s")
    context = Context()
    scheduler = make_scheduler(parse_scheduler("seer"), SchedulerSettings(), context, lambda _: 1)

    def on_tokens(request: Any, output: Any) -> None:
        counts.num_tokens += output.num_tokens
        counts.num_outputs += 1

    loop = RolloutLoop(instances, scheduler, context, events=counts, on_tokens=on_tokens, gather_s=GATHER_S)
    for one in instances:
        one._sink = loop.on_output
    before_bytes = resident_bytes()
    sampling = Sampling(max_tokens=4096)
    prompts = [list(range(i, i + PROMPT_TOKENS)) for i in range(args.requests // GROUP_SIZE + 1)]
    groups = [
        Group(id=i, num_requests=GROUP_SIZE, num_prompt_tokens=PROMPT_TOKENS, sampling=sampling, prompt=prompt, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    loop.admit(groups)

    async def serve() -> None:
        with collected_seldom():  # as a run does
            async for done in loop.serve():
                for one in instances:  # as a fleet whose instances draft
                    one.end_group(done.group.id)
                loop.forget(done.group)

    serving = asyncio.create_task(serve())
    await counts.filled.wait()
    filled = {
        "fill_s": time.monotonic() - began_s,
        "fill_cpu_s": time.process_time() - began_cpu_s,
        "in_flight": loop.buffer.num_in_flight,
        "bytes_per_request": (resident_bytes() - before_bytes) / args.requests,
    }
    say(f"{filled['in_flight']} requests started in {filled['fill_s']:.1f} s")
    steady = await steady_state(args.seconds, counts, loop)
    say(f"{steady['tokens_s']:,.0f} tokens/s on {steady['driver_cores']:.2f} cores")
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await asyncio.gather(*(one.close() for one in instances))
    await farm.wait()
    return connected | filled | steady | {"decided": counts.decided}


async def steady_state(seconds: float, counts: Counts, loop: RolloutLoop) -> dict[str, Any]:
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    tokens, outputs, starts = counts.num_tokens, counts.num_outputs, len(counts.decided)
    await asyncio.sleep(seconds)
    wall_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    tokens_s = (counts.num_tokens - tokens) / wall_s
    return {
        "tokens_s": tokens_s,
        "outputs_s": (counts.num_outputs - outputs) / wall_s,
        "starts_s": (len(counts.decided) - starts) / wall_s,
        "still_in_flight": loop.buffer.num_in_flight,
        "driver_cores": cpu_s / wall_s,
        "cores_per_1000_tokens_s": cpu_s / wall_s / (tokens_s / 1000) if tokens_s else None,
        "steady_from_s": began_s,
    }


def percentiles(name: str, times_s: list[float]) -> dict[str, float]:
    ordered = sorted(times_s)
    if not ordered:
        return {}
    shares = {"p50": 0.5, "p99": 0.99}
    return {f"{name}_{label}_ms": 1e3 * ordered[int(share * (len(ordered) - 1))] for label, share in shares.items()}


def summarize(found: dict[str, Any], farm: dict[str, Any]) -> dict[str, Any]:
    """With the times from decisions to the arrival of their chunks: while all were started, and afterwards."""
    steady_from_s, decided = found.pop("steady_from_s"), found.pop("decided")
    spans = [
        (decided_s, arrived_s - decided_s)
        for request, attempt, arrived_s in farm["arrived"]
        if (decided_s := decided.get((request, attempt))) is not None
    ]
    sent = [(at_s, TimedInstance.sent_s[key] - at_s) for key, at_s in decided.items() if key in TimedInstance.sent_s]
    found |= {"farm_cpu_s": farm["cpu_s"], "num_decisions": len(spans)}
    for name, times in (("sent", sent), ("wait", spans)):
        found |= percentiles(f"fill_{name}", [took_s for at_s, took_s in times if at_s < steady_from_s])
        found |= percentiles(f"steady_{name}", [took_s for at_s, took_s in times if at_s >= steady_from_s])
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=130_000, help="98 of them run on each instance")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tick", type=float, default=2.0, help="seconds between two outputs of a request")
    parser.add_argument("--tokens", type=int, default=8, help="of an output")
    parser.add_argument("--encrypted", action="store_true")
    args = parser.parse_args()
    allow_descriptors()  # before the farm inherits them
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "farm.json"
        found = summarize(asyncio.run(measure(args, out)), json.loads(out.read_text()))
    print(json.dumps({"stamp": take_stamp(args)} | found, indent=1))


if __name__ == "__main__":
    main()
