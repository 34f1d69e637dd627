# SPDX-License-Identifier: Apache-2.0
"""What a draft budget gains on a GPU of a given speed, over recorded responses, without a GPU.

    python benchmarks/engine/budget.py [--trace FILE.npz] [--batches 1,8,64]
                                       [--base-us 1800] [--row-us 6] [--host-us 100]

The engine plans, drafts, verifies and learns as on a GPU (recorded.py). The cost of a step is given: base + row x
(batched tokens of its graph), plus `host` if it has drafts. The defaults are Qwen2.5-1.5B on an H200. What is drafted
and accepted is real. Prints one JSON object per line: first the stamp, then tokens per second of virtual time and their
ratio to no drafts, for fixed allowances and for the default budget.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recorded import VOCABULARY, Recording, recorded_engine

from seer.drafting.base import Allowance, DraftBudget
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.drafting.live_budget import MeasuredBudget
from seer.engine.local.hosted import GPU_TREES
from seer.engine.local.tiny import make_tiny_model
from seer.speculation.step_report import StepReport
from stamp import QWEN_MIX, take_stamp

NUM_ROLLOUTS = 3
"""Of the same responses, one after the other. The first is not counted: the budget learns step costs in it."""


def earn(
    folder: Path,
    recording: Recording,
    make_budget: Callable[[GroupedDrafter], DraftBudget],
    price: Callable[[int], float],
    host_s: float,
) -> dict[str, float]:
    """Tokens per second of virtual time, and how much was drafted."""
    drafter = GroupedDrafter((), None)
    budget = make_budget(drafter)
    reports: list[StepReport] = []

    def on_step(report: StepReport) -> None:
        seconds, runner.device_s = runner.device_s + host_s * (report.num_steps if report.num_drafted else 1), 0.0
        reports.append(dataclasses.replace(report, duration_s=seconds / report.num_steps))
        if isinstance(budget, MeasuredBudget):
            budget.on_step(reports[-1])

    engine, runner = recorded_engine(folder, recording, drafter, budget, on_step)
    runner.price = price
    num_tokens = 0
    for rollout in range(NUM_ROLLOUTS):
        recording.teach(drafter)
        recording.begin(engine)
        while engine.busy:
            outputs = engine.step()
            num_tokens += sum(output.num_tokens for output in outputs)
        if not rollout:
            reports.clear()
            num_tokens = 0
    seconds = sum(report.duration_s * report.num_steps for report in reports)
    drafted, accepted = (sum(getattr(report, name) for report in reports) for name in ("num_drafted", "num_accepted"))
    return {"tokens_per_s": num_tokens / seconds, "drafted": drafted, "accepted": accepted}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--trace", type=Path, default=QWEN_MIX, help="a recording of grouped responses")
    options.add_argument("--batches", default="1,8,64")
    options.add_argument("--base-us", type=float, default=1800.0)
    options.add_argument("--row-us", type=float, default=6.0)
    options.add_argument("--host-us", type=float, default=100.0)
    args = options.parse_args()
    print(json.dumps({"stamp": take_stamp(args)}), flush=True)
    torch.set_num_threads(1)

    def price(num_batched_tokens: int) -> float:
        return 1e-6 * (args.base_us + args.row_us * num_batched_tokens)

    def allow(tokens: int, paths: int) -> Callable[[GroupedDrafter], DraftBudget]:
        return lambda drafter: lambda batch: Allowance(tokens, paths)

    budgets: dict[str, Callable[[GroupedDrafter], DraftBudget]] = {
        "no drafts": allow(0, 1), "2 tokens": allow(2, 1), "4 tokens": allow(4, 1), "8 tokens, 2 paths": allow(8, 2),
        "15 tokens, 4 paths": allow(15, 4),
        "default budget": lambda drafter: MeasuredBudget(drafter, GPU_TREES),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as at:
        folder = make_tiny_model(Path(at) / "tiny", "qwen2", seed=1, vocab_size=VOCABULARY)
        for batch in map(int, args.batches.split(",")):
            plain = 0.0
            for name, make_budget in budgets.items():
                found = earn(folder, Recording.read(args.trace, batch), make_budget, price, 1e-6 * args.host_us)
                plain = plain or found["tokens_per_s"]
                found = {key: round(value) for key, value in found.items()} | {
                    "ratio": round(found["tokens_per_s"] / plain, 3)
                }
                print(json.dumps({"batch": batch, "budget": name} | found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
