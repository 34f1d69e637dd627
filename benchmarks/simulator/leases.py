# SPDX-License-Identifier: Apache-2.0
"""Leases in the simulator: the recorded lengths on one and on four instances, with little KV memory and with plenty.

    python benchmarks/simulator/leases.py [--setups one,four] [--schedulers verl-sync,seer] [--seeds 0,1,2] [--after N]

Step costs are near those of Qwen2.5-Coder-1.5B on an H200, whole or a quarter of it; a load from the pool takes 20 ms
and 4 us a token. The groups of the recording are drawn in another order for each seed. Prints the speed against the
first scheduler, the tail, the KV in use while any request waits, and the counts of chunks, extensions and parks. With
--after, so many other orders have been rolled out before, and the run starts with the spread that they have shown.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.analysis.explain import StepFit
from seer.analysis.leases import report_leases
from seer.analysis.whatif import RecordedCost
from seer.context import Context
from seer.metrics.events import Event
from seer.metrics.summary import Summarizer, Summary
from seer.rollout import RolloutLoop
from seer.runs.run import scheduler_settings
from seer.scheduling.registry import make_scheduler, parse_scheduler
from seer.sim import virtual_time
from seer.sim.costs import H200, MODELS
from seer.sim.instance import SimulatedInstance
from seer.spread import Spread
from seer.transfer import TransferEstimate
from seer.types import Group, InstanceLimits, Sampling
from stamp import QWEN_MIX, print_stamp

MAX_TOKENS, GROUPS, BLOCK_SIZE = 4096, 48, 16
SETUPS: dict[str, dict[str, Any]] = {
    "one": {"instances": 1, "kv_tokens": 120_000, "slots": 256, "base_s": 2.5e-3, "slope_s": 35e-6},
    "one-spare": {"instances": 1, "kv_tokens": 1_500_000, "slots": 256, "base_s": 2.5e-3, "slope_s": 35e-6},
    "four": {"instances": 4, "kv_tokens": 30_000, "slots": 128, "base_s": 5e-3, "slope_s": 60e-6},
    "four-spare": {"instances": 4, "kv_tokens": 400_000, "slots": 64, "base_s": 5e-3, "slope_s": 60e-6},
}


@dataclass(frozen=True, kw_only=True)
class Cost(RecordedCost):
    """A measured step, and loads with a delay."""

    def transfer_s(self, num_tokens: int) -> float:
        """20 ms and the time of the tokens."""
        return 0.02 + super().transfer_s(num_tokens) if num_tokens > 0 else 0.0


def read_groups(seed: int) -> tuple[list[Group], list[int]]:
    """Groups of the recording in another order, and the lengths of all their responses."""
    with np.load(QWEN_MIX) as trace:
        lengths, prompts = trace["lengths"], trace["prompt_lengths"]
    chosen = np.random.RandomState(seed).permutation(len(lengths))[:GROUPS]
    sampling = Sampling(max_tokens=MAX_TOKENS)
    groups = [
        Group(id=i, num_requests=lengths.shape[1], num_prompt_tokens=int(prompts[row]), sampling=sampling)
        for i, row in enumerate(chosen)
    ]
    return groups, np.clip(lengths[chosen], 1, MAX_TOKENS).ravel().tolist()


def simulate(scheduler: str, setup: dict[str, Any], seed: int, spread: Spread) -> tuple[Summary, list[Event]]:
    """One run."""
    groups, lengths = read_groups(seed)
    fit = StepFit(base_s=setup["base_s"], slope_s=setup["slope_s"], prefill_s=2e-5)
    cost = Cost(model=MODELS["llama-8b"], gpu=H200, fit=fit, load_token_s=4e-6)
    limits = InstanceLimits(
        kv_blocks=setup["kv_tokens"] // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=setup["slots"],
        max_model_len=1 << 15,
    )
    context, summarizer, events = Context(spread=spread), Summarizer(setup["instances"]), []
    settings = scheduler_settings(None, [limits], MAX_TOKENS, TransferEstimate(cost.transfer_costs()))
    chosen = make_scheduler(parse_scheduler(scheduler), settings, context, lambda request: lengths[request.id])

    def note(event: Event) -> None:
        summarizer(event)
        events.append(event)

    async def rollout() -> None:
        instances = [
            SimulatedInstance(i, cost, limits, lengths.__getitem__, events=note) for i in range(setup["instances"])
        ]
        loop = RolloutLoop(instances, chosen, context, events=note)
        for instance in instances:
            await instance.start(loop.on_output)
        async for _ in loop.run(groups):
            pass
        for instance in instances:
            await instance.close()

    virtual_time.run(rollout())
    return summarizer.summary(), events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", default=",".join(SETUPS))
    parser.add_argument("--schedulers", default="verl-sync,verl,seer-paper,seer,seer-oracle")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--after", type=int, default=0, metavar="N", help="rollouts that seer has seen (%(default)s)")
    args = parser.parse_args()
    print_stamp(args)
    for name in args.setups.split(","):
        base: dict[int, float] = {}
        for scheduler in args.schedulers.split(","):
            ratios, found = [], None
            for seed in map(int, args.seeds.split(",")):
                spread = Spread()
                for earlier in range(args.after if scheduler == "seer" else 0):
                    simulate(scheduler, SETUPS[name], 1000 + args.after * seed + earlier, spread)
                summary, events = simulate(scheduler, SETUPS[name], seed, spread)
                ratios.append(base.setdefault(seed, summary.makespan_s) / summary.makespan_s)
                found = report_leases(events, kv_tokens=SETUPS[name]["kv_tokens"])
            print(f"{name:<10} {scheduler:<12} {np.mean(ratios):.3f}x {summary.makespan_s:.1f} s {found}", flush=True)


if __name__ == "__main__":
    main()
