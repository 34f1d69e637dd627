# SPDX-License-Identifier: Apache-2.0
"""What the store of drafts on the GPU costs: memory, host time and device time of a step.

    python benchmarks/vllm/store_cost.py [--requests 256] [--tokens 16384]

Every request has that many tokens, in groups of 16. A step learns a few new tokens of each and drafts for all of them,
as the speculator does after each step of the engine. Tokens are drawn from a few hundred, so that contexts repeat.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from stamp import print_stamp

GROUP = 16
NEW_TOKENS = 2


def run(args: argparse.Namespace) -> dict[str, Any]:
    from seer.engine.vllm.gpu_drafts.store import GroupStore, NewRow  # needs Triton

    device = torch.device(args.device)
    most = args.tokens + NEW_TOKENS * (args.steps + 1)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    store = GroupStore(args.requests, args.drafts, device)
    own_bytes = torch.cuda.memory_allocated() - before if device.type == "cuda" else 0
    tokens = torch.randint(0, 400, (args.requests, most), dtype=torch.int32, device=device)
    total = torch.full((args.requests,), args.tokens, dtype=torch.int32, device=device)
    rows = torch.arange(args.requests, dtype=torch.int32, device=device)
    sampled = torch.full((args.requests,), NEW_TOKENS, dtype=torch.int32, device=device)
    began_s = time.perf_counter()
    store.start(NewRow(row, row // GROUP, row, 512, most) for row in range(args.requests))
    start_s = time.perf_counter() - began_s
    store.learn(rows, tokens, total)
    host_s, device_s = [], []
    for _ in range(args.steps):
        total += NEW_TOKENS
        last = tokens[:, 0].to(torch.int64)
        _wait(device)
        began_s = time.perf_counter()
        store.learn(rows, tokens, total)
        store.draft(rows, sampled, last, tokens, total)
        host_s.append(time.perf_counter() - began_s)
        _wait(device)
        device_s.append(time.perf_counter() - began_s)
    return {
        "requests": args.requests,
        "tokens of each": args.tokens,
        "memory, MB": round(own_bytes / 1e6),
        "start of all, host ms": round(1e3 * start_s, 2),
        "step, host us": round(1e6 * statistics.median(host_s), 1),
        "step, host and device us": round(1e6 * statistics.median(device_s), 1),
        **store.counters(),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=256)
    options.add_argument("--tokens", type=int, default=16384)
    options.add_argument("--drafts", type=int, default=8)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--device", default="cuda")
    args = options.parse_args()
    print_stamp(args)
    print(json.dumps(run(args)))


if __name__ == "__main__":
    main()
