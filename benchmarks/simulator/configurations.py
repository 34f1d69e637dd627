# SPDX-License-Identifier: Apache-2.0
"""Is `seer` ever below `verl` or `seer-paper`, and how near to `seer-oracle`? 30 clusters, 8 arrangements each.

Ratios are of total seconds on the same arrangement; the mean over the arrangements counts. With speculation all three
draft as their name says (`verl` not at all); `seer-oracle` does not draft, so its share is without speculation.
configurations.md has the recorded result.

    python benchmarks/simulator/configurations.py [--seeds N] [--processes N] [--after N] [--only NAME ...]

With --after, `seer` has rolled out so many other arrangements of the configuration before, and starts with what they
have shown of how far groups outgrow their first finish, as in the later iterations of a training run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.machine.workers import worker_processes
from seer.sim.cluster import Speculation, simulate
from seer.sim.costs import H200, MODELS, InstanceCost
from seer.sim.workloads import PAPER, LengthModel, Workload, paper_workload
from seer.spread import Spread
from stamp import print_stamp

LEAST = 0.99
"""A mean ratio below this counts as worse."""


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """llama-8b on one H200 per instance, with KV memory for a share of what an instance's requests need at once."""

    mean: int = 2000
    maximum: int = 16_384
    sigma: float = 1.0
    correlation: float = 0.8
    num_groups: int = 96
    group_size: int = 8
    num_instances: int = 4
    memory: float = 0.3
    max_num_seqs: int = 1024
    prompt_tokens: int = 512

    def workload(self, name: str, seed: int) -> Workload:
        """One arrangement of it."""
        shape = LengthModel(mean=self.mean, maximum=self.maximum, sigma=self.sigma, correlation=self.correlation)
        lengths = shape.sample(self.num_groups, self.group_size, seed)
        longest = self.prompt_tokens + self.maximum
        needed = self.num_groups * self.group_size * (self.mean + self.prompt_tokens) / self.num_instances
        kv_tokens = max(longest + 64, round(self.memory * needed))
        cost = InstanceCost(model=MODELS["llama-8b"], gpu=H200)
        share = (kv_tokens * cost.model.kv_bytes_per_token + cost.model.weight_bytes) / H200.memory_bytes
        return Workload(
            name=name,
            lengths=tuple(map(tuple, lengths)),
            max_tokens=self.maximum,
            prompt_tokens=self.prompt_tokens,
            cost=replace(cost, memory_share=share),
            num_instances=self.num_instances,
            chunk_tokens=min(8192, max(256, self.maximum // 8)),
            max_num_seqs=self.max_num_seqs,
        )


SHRINK = {"moonlight": 8, "qwen2-vl-72b": 4, "kimi-k2": 4}
"""The paper's workloads on an eighth or a quarter of the cluster."""
R1 = {"mean": 3000, "maximum": 8192, "sigma": 0.75, "correlation": 0.75}
AGENT = {"mean": 1500, "maximum": 16_384, "sigma": 0.9, "correlation": 0.4, "group_size": 4, "num_groups": 192}
CALM = {"sigma": 0.4, "group_size": 4, "num_groups": 192}
SYNTHETIC: dict[str, Synthetic] = {
    "base": Synthetic(),
    "memory 0.1": Synthetic(memory=0.1),
    "memory 0.2": Synthetic(memory=0.2),
    "memory 0.6": Synthetic(memory=0.6),
    "memory 1.5": Synthetic(memory=1.5),
    "one instance": Synthetic(num_instances=1, num_groups=24),
    "two instances": Synthetic(num_instances=2, num_groups=48),
    "16 instances": Synthetic(num_instances=16),
    "8 slots": Synthetic(max_num_seqs=8, num_groups=24, memory=1.5),
    "32 slots": Synthetic(max_num_seqs=32, memory=1.0),
    "64 slots, memory 0.3": Synthetic(max_num_seqs=64),
    "groups of 1": Synthetic(group_size=1, num_groups=768),
    "groups of 32": Synthetic(group_size=32, num_groups=24),
    "uncorrelated": Synthetic(correlation=0.0),
    "fully correlated": Synthetic(correlation=1.0),
    "sigma 1.5": Synthetic(sigma=1.5),
    "short limit": Synthetic(maximum=4096),
    "long prompts": Synthetic(prompt_tokens=4096, mean=1000),
    "R1 lengths": Synthetic(**R1),
    "R1 lengths, memory 0.15": Synthetic(**R1, memory=0.15),
    "agent lengths": Synthetic(**AGENT),
    "agent lengths, memory 0.15": Synthetic(**AGENT, memory=0.15),
    "low variance": Synthetic(**CALM),
    "low variance, memory 0.15": Synthetic(**CALM, memory=0.15),
}
PAPER_SIZES = [(name, size) for name in PAPER for size in (8, 16)]
CONFIGURATIONS = (*SYNTHETIC, *(f"{name}, groups of {size}" for name, size in PAPER_SIZES))


def workload_of(name: str, seed: int) -> Workload:
    """One arrangement of a configuration."""
    if name in SYNTHETIC:
        return SYNTHETIC[name].workload(name, seed)
    paper, size = PAPER_SIZES[CONFIGURATIONS.index(name) - len(SYNTHETIC)]
    return paper_workload(paper, seed=seed, group_size=size, shrink=SHRINK[paper])


Job = tuple[str, int, str, Speculation]


def total_s(job: Job, after: int) -> float:
    """Total seconds of one simulation."""
    name, seed, scheduler, speculation = job
    spread = Spread()
    for earlier in range(after if scheduler == "seer" else 0):
        simulate(workload_of(name, 1000 + after * seed + earlier), scheduler, speculation=speculation, spread=spread)
    return simulate(workload_of(name, seed), scheduler, speculation=speculation, spread=spread).summary.makespan_s


def jobs_of(names: list[str], num_seeds: int) -> list[Job]:
    """Every simulation that the table needs, once."""
    runs: list[tuple[str, Speculation]] = [("verl", "off"), ("seer-oracle", "off")]
    runs += [(scheduler, mode) for scheduler in ("seer-paper", "seer") for mode in ("off", "auto")]  # type: ignore[misc]
    return [(name, seed, scheduler, mode) for name in names for seed in range(num_seeds) for scheduler, mode in runs]


def row(name: str, seconds: dict[Job, float], num_seeds: int) -> tuple[str, list[float]]:
    """A line of the table, and the ratios that have to reach `LEAST`."""

    def ratio(scheduler: str, mode: Speculation) -> float:
        reference: Speculation = mode if scheduler == "seer-paper" else "off"
        return fmean(seconds[name, s, scheduler, reference] / seconds[name, s, "seer", mode] for s in range(num_seeds))

    ratios = [ratio("verl", "off"), ratio("seer-paper", "off"), ratio("verl", "auto"), ratio("seer-paper", "auto")]
    shown = " | ".join(f"{value:.3f}" if value >= LEAST else f"**{value:.3f}**" for value in ratios)
    return f"| {name} | {ratio('seer-oracle', 'off'):.3f} | {shown} |", ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="arrangements of each (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="simulations at once (%(default)s)")
    parser.add_argument("--after", type=int, default=0, metavar="N", help="rollouts that seer has seen (%(default)s)")
    parser.add_argument("--only", nargs="+", default=list(CONFIGURATIONS), choices=CONFIGURATIONS, metavar="NAME")
    args = parser.parse_args()
    print_stamp(args)
    print("| configuration | of seer-oracle | verl | seer-paper | verl, drafts | seer-paper, drafts |")
    print("|---|---|---|---|---|---|")
    worse = 0
    with worker_processes(args.processes) as pool:
        for name in args.only:
            jobs = jobs_of([name], args.seeds)
            line, ratios = row(
                name, dict(zip(jobs, pool.map(partial(total_s, after=args.after), jobs), strict=True)), args.seeds
            )
            worse += any(value < LEAST for value in ratios)
            print(line, flush=True)
    print(f"\nThroughput of seer over each; {worse} of {len(args.only)} configurations have a mean below {LEAST}.")


if __name__ == "__main__":
    main()
