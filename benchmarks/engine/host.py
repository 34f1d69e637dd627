# SPDX-License-Identifier: Apache-2.0
"""Host time of a step of the embedded engine, measured without a GPU: all work of a step except the device's.

    python benchmarks/engine/host.py [--trace FILE.npz] [--batches 1,8,64] [--profile]

The engine plans, drafts, verifies, learns and reports as on a GPU, over recorded responses (recorded.py). Prints one
JSON object per line: first the stamp, then the best of five runs for each batch size and draft shape.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recorded import VOCABULARY, Recording, recorded_engine

from seer.drafting.base import Allowance
from seer.drafting.grouped_drafter import GroupedDrafter
from seer.engine.local.tiny import make_tiny_model
from seer.speculation.step_report import StepReport
from stamp import QWEN_MIX, take_stamp


def measure(folder: Path, trace: Path, batch: int, allowance: Allowance, *, profile: bool) -> dict[str, float]:
    """Microseconds of host work per step and per request, and tokens per request and step."""
    recording = Recording.read(trace, batch)
    drafter = GroupedDrafter((), None)
    steps: list[StepReport] = []
    engine, runner = recorded_engine(folder, recording, drafter, lambda batch: allowance, steps.append)
    best: dict[str, float] = {}
    watch = cProfile.Profile() if profile else None
    for _ in range(5):
        recording.teach(drafter)
        recording.begin(engine)
        steps.clear()
        num_tokens = 0
        if watch:
            watch.enable()
        began_s = time.perf_counter()
        while engine.busy:
            num_tokens += sum(output.num_tokens for output in engine.step())
        wall_s = time.perf_counter() - began_s - runner.sampling_s
        runner.sampling_s = 0.0
        if watch:
            watch.disable()
        num_steps = sum(step.num_steps for step in steps)
        num_works = num_tokens - sum(step.num_accepted for step in steps)  # sum over steps of their requests
        found = {
            "us_per_step": wall_s / num_steps * 1e6,
            "us_per_request": wall_s / num_works * 1e6,
            "requests_per_step": num_works / num_steps,
            "tokens_per_request": num_tokens / num_works,
        }
        if not best or found["us_per_step"] < best["us_per_step"]:
            best = found
    if watch:
        pstats.Stats(watch).sort_stats("tottime").print_stats(25)
    return best


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--trace", type=Path, default=QWEN_MIX, help="a recording of grouped responses")
    options.add_argument("--batches", default="1,8,64")
    options.add_argument("--profile", action="store_true", help="also print the time by function")
    args = options.parse_args()
    print(json.dumps({"stamp": take_stamp(args)}), flush=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as at:
        folder = make_tiny_model(Path(at) / "tiny", "qwen2", seed=1, vocab_size=VOCABULARY)
        for batch in map(int, args.batches.split(",")):
            for depth, paths in ((4, 1), (8, 2)):
                found = measure(folder, args.trace, batch, Allowance(depth, paths), profile=args.profile)
                rounded = {name: round(value, 2) for name, value in found.items()}
                print(json.dumps({"batch": batch, "tokens": depth, "paths": paths} | rounded), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
