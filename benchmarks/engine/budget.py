"""What a draft budget earns on a device of a given speed, over recorded responses and without the device.

    python benchmarks/engine/budget.py --trace ../shared/traces/qwen1.5b-mix-n16.npz [--batches 1,8,64]
                                       [--base-us 1800] [--row-us 6] [--host-us 100]

The engine plans, drafts, verifies and learns as on a GPU (recorded.py); a step takes base + row x (rows of its graph),
and one with drafts `host` more. The defaults are Qwen2.5-1.5B on an H200. Prints tokens per second of virtual time and
their ratio to no drafts, for fixed allowances and for the budget that ships: what of it is the device's is given, what
is the drafts' is real.
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
from recorded import Recording, recorded_engine

from seer.drafting.base import Allowance, DraftBudget
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.drafting.live_budget import MeasuredBudget
from seer.engine.local.graph_shapes import DEPTHS
from seer.engine.local.hosted import TREE_PATHS
from seer.engine.local.tiny import make_tiny_model
from seer.speculation.step_report import StepReport

NUM_ROLLOUTS = 3
"""Of the same responses, one after the other; the first is left out, as costs are learnt there."""


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
    options.add_argument("--trace", type=Path, required=True, help="grouped responses, an .npz of shared/traces")
    options.add_argument("--batches", default="1,8,64")
    options.add_argument("--base-us", type=float, default=1800.0)
    options.add_argument("--row-us", type=float, default=6.0)
    options.add_argument("--host-us", type=float, default=100.0)
    args = options.parse_args()
    torch.set_num_threads(1)

    def price(num_batched_tokens: int) -> float:
        return 1e-6 * (args.base_us + args.row_us * num_batched_tokens)

    def allow(tokens: int, paths: int) -> Callable[[GroupedDrafter], DraftBudget]:
        return lambda drafter: lambda num_running, mean_context: Allowance(tokens, paths)

    budgets: dict[str, Callable[[GroupedDrafter], DraftBudget]] = {
        "no drafts": allow(0, 1), "2 tokens": allow(2, 1), "4 tokens": allow(4, 1), "8 tokens, 2 paths": allow(8, 2),
        "the budget that ships": lambda drafter: MeasuredBudget(drafter, max_paths=TREE_PATHS, depths=DEPTHS),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as at:
        folder = make_tiny_model(Path(at) / "tiny", "qwen2", seed=1)
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
