# SPDX-License-Identifier: Apache-2.0
"""Where does parking KV in the pool pay on a GPU? benchmarks/rollout/conversations.py, predicted before it is measured.

    python benchmarks/simulator/tool_waits.py [--seeds 3]

The first two rows were measured on an H200, too (benchmarks/rollout/results.md). The costs are fitted to the second:
seconds of a step without prompts, prompt tokens a second, and loaded bytes a second. The other rows have more KV memory
and more conversations at once. Turns, lengths and tool times are drawn as there. In the simulator loads run beside the
steps and the driver takes no time, so `park` is predicted too fast.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from seer.sim.cluster import simulate
from seer.sim.costs import H200, MODELS, ROOFLINE_FLOPS, InstanceCost
from seer.sim.turns import RequestTurns, WhileWaiting
from seer.sim.workloads import Workload
from stamp import print_stamp

STEP_S = 0.005
"""46 to 47 s of steps without prompts in 8,294 and 9,263 steps."""
PROMPT_TOKENS_S = 280_000
LOAD_BYTES_S = 23.6e9
"""97 GB in 4.1 s."""
TOOL_S = (0.2, 5.0)
WAYS: dict[WhileWaiting, str] = {"park": "seer", "recompute": "verl", "hold": "verl"}
"""And the scheduler of each."""


@dataclass(frozen=True)
class Setting:
    """Options of conversations.py, and what the conversations were like."""

    conversations: int
    kv_tokens: int
    max_num_seqs: int
    prompt_tokens: int = 5000
    turns: tuple[int, ...] = (3, 4, 4, 5, 5, 6)
    """One of these, each as likely."""
    generated_tokens: int = 117
    """Of a turn, in the mean."""
    given_tokens: int = 136
    """Of an answer."""
    measured_s: tuple[float, ...] = ()
    """By `WAYS`, where it was measured."""


SETTINGS = (
    Setting(160, 90_000, 64, 3000, (2, 3, 4), 107, 153, measured_s=(26.5, 30.5, 57.6)),
    Setting(200, 90_000, 64, measured_s=(66.4, 80.9)),
    Setting(400, 90_000, 64),
    Setting(400, 180_000, 128),
    Setting(400, 360_000, 128),
)


def workload_of(setting: Setting, seed: int) -> Workload:
    """One drawing of it."""
    dice, plan = random.Random(seed), []
    for _ in range(setting.conversations):
        num_turns, ends = dice.choice(setting.turns), [0]
        for _ in range(num_turns):
            ends.append(ends[-1] + max(8, round(dice.gauss(setting.generated_tokens, setting.generated_tokens / 4))))
        given = (setting.given_tokens,) * (num_turns - 1)
        plan.append(RequestTurns(tuple(ends[1:]), given, tuple(dice.uniform(*TOOL_S) for _ in range(num_turns))))
    model = MODELS["qwen2.5-1.5b"]
    kv_bytes = setting.kv_tokens * model.kv_bytes_per_token
    cost = InstanceCost(
        model=model,
        gpu=replace(H200, network_bytes_s=LOAD_BYTES_S),
        overhead_s=STEP_S,
        slowdown=H200.bf16_flops_s * ROOFLINE_FLOPS / (2 * model.active_parameters * PROMPT_TOKENS_S),
        memory_share=(kv_bytes + model.weight_bytes) / H200.memory_bytes,
    )
    longest = max(one.ends[-1] for one in plan)
    return Workload(
        name="conversations",
        lengths=tuple((one.ends[-1],) for one in plan),
        turns=tuple(plan),
        max_tokens=longest,
        prompt_tokens=setting.prompt_tokens,
        cost=cost,
        num_instances=1,
        chunk_tokens=longest,
        max_num_seqs=setting.max_num_seqs,
    )


def seconds(setting: Setting, way: WhileWaiting, seeds: int) -> float:
    """The mean over some drawings."""
    return fmean(
        simulate(workload_of(setting, seed), WAYS[way], speculation="off", while_waiting=way).summary.makespan_s
        for seed in range(seeds)
    )


def main() -> None:
    """A row per setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print_stamp(args)
    print(f"| conversations, KV tokens, slots | {', '.join(WAYS)}: s | measured | park over the better |")
    print("|---|---|---|---|")
    for setting in SETTINGS:
        park, *others = found = [seconds(setting, way, args.seeds) for way in WAYS]
        print(
            f"| {setting.conversations}, {setting.kv_tokens:,}, {setting.max_num_seqs}",
            ", ".join(f"{one:.1f}" for one in found),
            ", ".join(map(str, setting.measured_s)) or "-",
            f"{min(others) / park:.2f} |",
            sep=" | ",
            flush=True,
        )


if __name__ == "__main__":
    main()
