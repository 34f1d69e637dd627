# SPDX-License-Identifier: Apache-2.0
"""Instances that join a rollout: does it end when the simulator says?

    python benchmarks/rollout/elastic.py [--prompts 24] [--join-after 3] [--step-s 0.02]

A rollout of fake instances, whose steps take a given time, starts with one and gains three. The simulator then runs the
same lengths with the same loop and scheduler, and gains its instances when the real ones had joined. Its time of a step
is calibrated by another rollout, of one instance alone. Fake instances wait instead of computing, so four of them fit
on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer import HostingConfig, Rollout, Sampling
from seer.context import Context
from seer.engine.base import InstanceLimits
from seer.metrics.events import Ended, Event, Queued
from seer.placement import PlacementConfig
from seer.rollout import RolloutLoop
from seer.scheduling.registry import SchedulerSettings, make_scheduler, parse_scheduler
from seer.sim import virtual_time
from seer.sim.costs import H200, InstanceCost, ModelShape
from seer.sim.instance import SimulatedInstance
from seer.types import Group
from stamp import take_stamp

PROMPT = [1, 2, 3]
NEGLIGIBLE = ModelShape(
    name="fake",
    num_layers=1,
    hidden=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate=8,
    vocabulary=8,
)
"""Next to a step of milliseconds."""


class Watch:
    """Times of a run, from its first request."""

    def __init__(self) -> None:
        self.first_s = self.last_s = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Queued):
            self.first_s = self.first_s or event.t_s
        elif isinstance(event, Ended):
            self.last_s = event.t_s


async def real(args: argparse.Namespace, *, num_joining: int, seed: int) -> dict[str, Any]:
    watch, joined_s = Watch(), 0.0
    settings: dict[str, Any] = {"engine_settings": {"step_s": args.step_s}, "max_num_seqs": args.max_num_seqs}
    hosting = HostingConfig(pin_cores=False, flush_s=0.0)
    async with Rollout("none", engine="fake", instances=1, kv_blocks=4096, hosting=hosting, **settings) as rollout:

        async def join() -> None:
            nonlocal joined_s
            if num_joining:
                await asyncio.sleep(args.join_after)
                await rollout.add_instances(num_joining)
            joined_s = asyncio.get_running_loop().time()

        joining = asyncio.create_task(join())
        lengths: dict[tuple[int, int], int] = {}
        sampling = Sampling(max_tokens=args.max_tokens)
        num_prompts = args.prompts if num_joining else max(2, args.prompts // 4)
        async for group in rollout.run([PROMPT] * num_prompts, n=4, sampling=sampling, events=watch, seed=seed):
            lengths |= {(one.group, one.index): len(one.token_ids) for one in group.responses}
        await joining
        limits = rollout.fleet.instances[0].limits
    return {
        "lengths": lengths,
        "limits": limits,
        "joined_s": joined_s - watch.first_s,
        "makespan_s": watch.last_s - watch.first_s,
    }


def predicted_s(args: argparse.Namespace, run: dict[str, Any], step_s: float, joined_s: float = 1e6) -> float:
    """The same loop over simulated instances, of which three join."""
    lengths: dict[Any, int] = run["lengths"]
    limits: InstanceLimits = run["limits"]
    cost = InstanceCost(model=NEGLIGIBLE, gpu=H200, num_gpus=1, overhead_s=step_s, slowdown=1.0)
    flat = [lengths[key] for key in sorted(lengths)]
    sampling = Sampling(max_tokens=args.max_tokens)
    watch, context = Watch(), Context()
    blocks = max(1, round(max(64, min(8192, args.max_tokens // 8)) / limits.block_size))
    placement = PlacementConfig(imbalance_threshold=max(1, limits.max_num_seqs // 8), transfer=None)
    settings = SchedulerSettings(chunk_tokens=blocks * limits.block_size, placement=placement, whole_blocks=True)

    def an_instance(id: int) -> SimulatedInstance:
        return SimulatedInstance(id, cost, limits, flat.__getitem__, sample_state=False)

    async def scenario() -> None:
        scheduler = make_scheduler(parse_scheduler("seer"), settings, context, lambda request: flat[request.id])
        instances = [an_instance(0)]
        loop = RolloutLoop(instances, scheduler, context, events=watch)
        await instances[0].start(loop.on_output)

        async def join() -> None:
            await asyncio.sleep(joined_s)
            for id in range(1, 4):
                one = an_instance(id)
                await one.start(loop.on_output)
                loop.add_instance(one)

        joining = asyncio.create_task(join())
        groups = [Group(id=i, num_requests=4, num_prompt_tokens=3, sampling=sampling) for i in range(len(flat) // 4)]
        async for _ in loop.run(groups):
            pass
        await joining

    virtual_time.run(scenario())
    return watch.last_s - watch.first_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24, help="with four responses each")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--join-after", type=float, default=3.0, help="seconds until three instances are asked for")
    args = parser.parse_args()
    began_s = time.monotonic()
    alone = asyncio.run(real(args, num_joining=0, seed=1))
    step_s = args.step_s * alone["makespan_s"] / predicted_s(args, alone, args.step_s)
    found = asyncio.run(real(args, num_joining=3, seed=2))
    prediction_s = predicted_s(args, found, step_s, found["joined_s"])
    alone_s = predicted_s(args, found, step_s)
    print(
        json.dumps(
            {
                "stamp": take_stamp(args),
                "tokens": sum(found["lengths"].values()),
                "step_s": step_s,
                "joined_s": found["joined_s"],
                "makespan_s": found["makespan_s"],
                "predicted_s": prediction_s,
                "off_by": found["makespan_s"] / prediction_s - 1.0,
                "predicted_alone_s": alone_s,
                "wall_s": time.monotonic() - began_s,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
