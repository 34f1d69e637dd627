# SPDX-License-Identifier: Apache-2.0
"""Which share of a core does the driver take? Instances are processes that answer at a given rate, without a model.

    python benchmarks/scheduling/driver.py [--instances 1] [--running 256] [--rate 30000] [--seconds 15] [--profile]

The driver is a whole run: hosted instances (paced_instance.py), the `seer` scheduler with leases, event list, journal.
Printed are processor seconds of this process over seconds of wall time, between the moment when all slots are filled
and the moment when a tenth of them is free, and the events of that time.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.analysis.leases import report_leases
from seer.config import FakeEngineConfig, HostingConfig, KvConfig, RolloutConfig
from seer.engine.prepare import prepare
from seer.hosting.fleet import HostedFleet
from seer.metrics.events import Event
from seer.runs.prompts import EncodedPrompt, Prompt
from seer.runs.run import Run, RunOptions
from seer.transfer import TransferEstimate
from seer.types import Sampling
from stamp import print_stamp

GROUP_SIZE, PROMPT_TOKENS, MAX_TOKENS, BLOCK_SIZE = 16, 64, 4096, 16


class NoPool:
    """Stands for a pool, so that the scheduler extends leases and parks."""

    transfer = TransferEstimate()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Meter:
    """Looks at the run twice a second; cheap beside what it measures."""

    def __init__(self, run: Run, num_running: int, profile: cProfile.Profile | None) -> None:
        self._run, self._num_running, self._profile = run, num_running, profile
        self.marks: list[tuple[float, float, int]] = []

    async def watch(self) -> None:
        """Mark the processor time while the slots are full."""
        while True:
            await asyncio.sleep(0.5)
            loop = self._run.loop
            if loop is None:
                continue
            buffer = loop.buffer
            if buffer.num_waiting or buffer.num_in_flight >= 0.9 * self._num_running:
                if not self.marks and self._profile is not None:
                    self._profile.enable()
                tokens = sum(request.num_generated for request in buffer.requests())
                self.marks.append((time.monotonic(), time.process_time(), tokens))
            elif self.marks and self._profile is not None:
                self._profile.disable()


def prompts(num_groups: int) -> list[EncodedPrompt]:
    sampling = Sampling(max_tokens=MAX_TOKENS)
    ids = tuple(range(PROMPT_TOKENS))
    return [EncodedPrompt(Prompt(id=f"p{i}", token_ids=ids), ids, sampling, GROUP_SIZE) for i in range(num_groups)]


async def measure(args: argparse.Namespace, folder: Path) -> None:
    slots = args.running // args.instances
    config = RolloutConfig(
        model="none",
        engine="fake",
        instances=args.instances,
        max_num_seqs=slots,
        kv=KvConfig(blocks=args.kv_tokens // args.instances // BLOCK_SIZE, block_size=BLOCK_SIZE),
        max_model_len=PROMPT_TOKENS + MAX_TOKENS,
        engine_settings=FakeEngineConfig(step_s=args.running / args.rate),
    )
    engine = replace(prepare(config), factory="paced_instance:make_paced")
    fleet = HostedFleet(engine, args.instances, options=HostingConfig(pin_cores=False))
    await fleet.start()
    fleet.pool = NoPool()  # type: ignore[assignment]
    events: list[Event] = []
    num_groups = round(args.seconds * args.rate / (GROUP_SIZE * MAX_TOKENS / 4) + args.running / GROUP_SIZE)
    run = Run(fleet, prompts(num_groups), None, RunOptions(events=events.append, speculation="off"))
    profile = cProfile.Profile(time.process_time) if args.profile else None
    meter = Meter(run, args.running, profile)
    watching = asyncio.create_task(meter.watch())
    async for _ in run.groups():
        pass
    watching.cancel()
    fleet.pool = None
    await fleet.close()
    report(args, meter.marks, events)
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(args.lines)


def report(args: argparse.Namespace, marks: list[tuple[float, float, int]], events: list[Event]) -> None:
    (began_s, cpu_s, tokens), (ended_s, cpu_end_s, tokens_end) = marks[0], marks[-1]
    wall_s = ended_s - began_s
    counts = Counter(type(event).__name__ for event in events if began_s <= event.t_s <= ended_s)
    rates = ", ".join(f"{name} {count / wall_s:.0f}" for name, count in counts.most_common())
    print(
        f"{args.instances} instances, {args.running} running: driver {(cpu_end_s - cpu_s) / wall_s:.1%} of a core at "
        f"{(tokens_end - tokens) / wall_s:,.0f} tokens/s, {wall_s:.1f} s; events/s: {rates}\n"
        f"whole run: {report_leases(events, kv_tokens=args.kv_tokens // args.instances)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--running", type=int, default=256, help="sequence slots of all instances")
    parser.add_argument("--rate", type=float, default=30_000.0, help="tokens/s with all slots filled")
    parser.add_argument("--kv-tokens", type=int, default=220_000, help="KV memory of all instances")
    parser.add_argument("--seconds", type=float, default=15.0, help="about so long")
    parser.add_argument("--profile", action="store_true", help="also print the time by function")
    parser.add_argument("--lines", type=int, default=45, help="of the profile")
    args = parser.parse_args()
    print_stamp(args)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(args, Path(folder)))


if __name__ == "__main__":
    main()
